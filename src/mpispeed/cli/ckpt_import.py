"""`mpispeed ckpt import`: conversion of checkpoints of other programs. Needs torch, no MPI."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mpispeed.base.units import format_bytes
from mpispeed.ckpt.foreign.found import BUFFER_NAMES, ReadOptions
from mpispeed.ckpt.foreign.opening import FORMS
from mpispeed.ckpt.foreign.slices import KINDS
from mpispeed.ckpt.tools import importing
from mpispeed.cli.ckpt_report import as_json_option, reported, say


def _pairs(_context: click.Context, parameter: click.Parameter, rows: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for row in rows:
        first, is_pair, second = row.partition("=")
        if not is_pair or not first:
            msg = f"{row!r} is not of the form {parameter.metavar}"
            raise click.BadParameter(msg)
        pairs.append((first, second))
    return pairs


@click.command("import")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DST", type=click.Path(path_type=Path))
@click.option("--tag", help="Name of the new checkpoint; by default that of the source.")
@click.option("--source-tag", help="Which checkpoint of a DeepSpeed folder; by default the latest.")
@click.option("--format", "form", type=click.Choice(FORMS), default="auto", show_default=True, help="What SRC is.")
@click.option("--prefix-map", multiple=True, metavar="OLD=NEW", callback=_pairs, help="Regular expression on names.")
@click.option("--weights-only", is_flag=True, help="Leave optimizer state out.")
@click.option("--frozen", default="", metavar="REGEX", help="Parameters that are not trained, if SRC does not say.")
@click.option("--buffers", default=BUFFER_NAMES, metavar="REGEX", help="Buffers, if SRC does not say which they are.")
@click.option(
    "--tp-pattern",
    multiple=True,
    metavar="KIND=REGEX",
    callback=_pairs,
    help=f"How slices of tensor parallelism are put together; KIND is {', '.join(KINDS)}.",
)
@click.option("--overwrite", is_flag=True, help="Replace a tag that exists.")
@as_json_option
def import_(
    source: Path,
    folder: Path,
    tag: str | None,
    source_tag: str | None,
    form: str,
    prefix_map: list[tuple[str, str]],
    weights_only: bool,
    frozen: str,
    buffers: str,
    tp_pattern: list[tuple[str, str]],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC of another program into the folder DST as one of ours.

    SRC is a safetensors or torch file, a folder with shards and an index, or a folder of DeepSpeed checkpoints (ZeRO
    of any kind, pipelines, universal). Nothing pickled is executed.
    """
    with reported(as_json):
        report = importing.import_checkpoint(
            source,
            folder,
            tag=tag,
            source_tag=source_tag,
            options=ReadOptions(form, weights_only, frozen, buffers, tp_pattern),
            prefix_map=prefix_map,
            overwrite=overwrite,
        )
    saved = report.saved
    if as_json:
        row = {
            "path": str(saved.path),
            "tag": saved.tag,
            "form": report.form,
            "params": report.params,
            "buffers": report.buffers,
            "aliases": report.aliases,
            "slots": report.slots,
            "bytes": saved.size_bytes,
            "seconds": saved.seconds,
            "left_out": report.left_out,
        }
        click.echo(json.dumps(row, indent=1))
        return
    say(
        f"{saved.path}: {report.params} parameters ({', '.join(report.slots)}), {report.buffers} buffers, "
        f"{report.aliases} aliases, {format_bytes(saved.size_bytes)} from {report.form}"
    )
    for text in report.left_out:
        say(f"left out: {text}", err=True)
