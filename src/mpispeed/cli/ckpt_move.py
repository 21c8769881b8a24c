"""`mpispeed ckpt export` and `reshape`. They need no MPI; export needs torch only to write its own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpispeed.base.units import format_bytes, parse_count
from mpispeed.ckpt.tools import exporting
from mpispeed.ckpt.tools.show import open_location
from mpispeed.cli.ckpt_report import as_json_option, reported, say

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Reader

_SHARD_SIZE = "5GB"


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_count(value)
    except ValueError as failure:
        raise click.BadParameter(str(failure), context, parameter) from failure


def _rows(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    """Rows from OLD=NEW; the last "=" counts, because expressions have more use for one than names."""
    if any("=" not in value for value in values):
        msg = "write OLD=NEW; NEW may be empty"
        raise click.BadParameter(msg, context, parameter)
    return [(old, new) for old, _, new in (value.rpartition("=") for value in values)]


@click.command("export")
@click.argument("location", metavar="DIR[:TAG]")
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(list(exporting.FORMATS)), help="Format; by default that of the suffix of OUT.")
@click.option(
    "--dtype", type=click.Choice(list(exporting.DTYPES)), default="fp32", show_default=True,
    help="Of all floating tensors; keep: the dtype of training.",
)  # fmt: skip
@click.option(
    "--shard-size", "shard_bytes", callback=_bytes, metavar="BYTES",
    help=f"Largest file in a folder, such as 500MB or 2GiB.  [default: {_SHARD_SIZE}]",
)  # fmt: skip
@click.option("--exclude-frozen", is_flag=True, help="Leave out parameters that are not trained.")
@click.option(
    "--prefix-map", callback=_rows, multiple=True, metavar="OLD=NEW",
    help="Replace what fits the regular expression OLD in names; repeatable. Use ^ for the start.",
)  # fmt: skip
@click.option(
    "--quantized", is_flag=True,
    help="Weights as compression_training of the run has them in the end: masked, and those of up to 8 bits as packed "
    "codes. HDF5 only.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace files that exist.")
@as_json_option
def export(
    location: str,
    output: Path,
    to: str | None,
    dtype: str,
    shard_bytes: int | None,
    exclude_frozen: bool,
    prefix_map: list[tuple[str, str]],
    quantized: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the weights and buffers of a checkpoint to OUT for other programs.

    OUT with a suffix of the format is one file, else a folder.
    """
    form = to or exporting.format_of(output)
    if not form:
        msg = f"{output} has no suffix of a known format; pass --to"
        raise click.UsageError(msg)
    if shard_bytes is not None and (exporting.is_one_file(output) or not exporting.FORMATS[form].has_shards):
        msg = f"--shard-size cuts safetensors and torch weights in a folder; {output} as {form} is one file"
        raise click.UsageError(msg)
    with reported(as_json), open_location(location) as reader:
        packer = _packer(reader) if quantized else None
        report = exporting.export(
            reader,
            output,
            to=form,
            dtype=dtype,
            shard_bytes=parse_count(_SHARD_SIZE) if shard_bytes is None else shard_bytes,
            exclude_frozen=exclude_frozen,
            prefix_map=prefix_map,
            overwrite=force,
            packer=packer,
        )
    if as_json:
        content = {"files": [str(path) for path in report.files], "bytes": report.size_bytes}
        click.echo(json.dumps(content | {"tensors": report.tensors, "overflows": report.overflows}, indent=1))
        return
    for path in report.files:
        say(str(path))
    say(f"{report.tensors} tensors, {format_bytes(report.size_bytes)}")
    for name, count in report.overflows.items():
        say(f"{name}: {count} elements are too large for {dtype}", err=True)


def _packer(reader: Reader) -> exporting.Packer:
    """What makes codes; weights that it leaves alone are told."""
    from mpispeed.compression.export import CheckpointPacker  # imports torch, which other exports do without

    made = CheckpointPacker(reader)
    for name, why in made.left.items():
        say(f"{name} is exported as it is: {why}", err=True)
    return made


@click.command("reshape")
@click.argument("location", metavar="SRC[:TAG]")
@click.argument("folder", metavar="DST", type=click.Path(path_type=Path))
@click.option("--files", type=click.IntRange(min=1), required=True, help="How many files hold elements.")
@click.option("--force", is_flag=True, help="Replace the tag if it exists in DST.")
@as_json_option
def reshape(location: str, folder: Path, files: int, force: bool, as_json: bool) -> None:
    """Copy a checkpoint to the folder DST, under its tag, with its elements in another number of files."""
    from mpispeed.ckpt.tools import reshape as reshaping  # imports torch, which export can do without

    with reported(as_json), open_location(location) as reader:
        report = reshaping.reshape(reader, folder, files=files, overwrite=force)
    if as_json:
        content = {"path": str(report.path), "tag": report.tag, "files": report.files, "bytes": report.size_bytes}
        click.echo(json.dumps(content | {"digest": report.digest}, indent=1))
        return
    many = "1 file" if report.files == 1 else f"{report.files} files"
    say(f"{report.path}: elements in {many}, {format_bytes(report.size_bytes)}, {report.digest}")
