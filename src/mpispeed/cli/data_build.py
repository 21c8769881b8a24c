"""`mpispeed data build`, `import` and `merge`: token stores made from files, by all ranks of a job.

Exit codes: 0 the store is there; 2 something is wrong with the question or the files; others as of any job that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.cli.generate import RankCommand
from mpispeed.cli.plan import Count

FORMATS = ("jsonl", "text", "parquet", "arrow", "megatron")
DOCUMENTS = ("line", "paragraph", "file")
COLUMNS = ("length", "rarity")
PART_BYTES = 64 << 20

_Command = Callable[..., Any]


def _shared(command: _Command) -> _Command:
    """Options of both commands that read files."""
    options = [
        click.option("--out", "-o", type=click.Path(path_type=Path), required=True, help="The store, a file .h5."),
        click.option("--format", "kind", type=click.Choice(FORMATS), help="Of inputs whose names do not tell it."),
        click.option("--pack", "row", type=click.IntRange(min=1), metavar="LENGTH", default=None,
                     help="Pack whole documents into rows of at most LENGTH tokens."),
        click.option("--columns", default="", metavar="NAMES", help=f"Numbers of each document: {', '.join(COLUMNS)}."),
        click.option("--skip-bad", is_flag=True, help="Leave out records that cannot be used, and count them."),
        click.option("--part-size", type=Count(), default=PART_BYTES, help="Of inputs in one part; default: 64MiB."),
        click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path)),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=RankCommand)
@click.option("--tokenizer", "-t", required=True, metavar="byte|PATH",
              help="byte, a tokenizer.json, or the folder of a tokenizer of transformers.")  # fmt: skip
@click.option("--field", default="text", show_default=True, help="Entry or column that has the texts.")
@click.option("--documents", type=click.Choice(DOCUMENTS), default="line", show_default=True,
              help="What a document of a text file is; a paragraph ends with an empty line.")  # fmt: skip
@click.option("--eos", "end", default="auto", show_default=True, metavar="auto|none|TOKEN",
              help="Token after each document: that of the tokenizer's files, none, one or its number.")  # fmt: skip
@click.option("--special-tokens", is_flag=True, help="Add what the tokenizer puts around a text.")
@click.option("--parse-special", is_flag=True, help="Texts of special tokens within documents are these, not text.")
@_shared
def build(
    tokenizer: str, field: str, documents: str, end: str, special_tokens: bool, parse_special: bool, **asked: Any
) -> None:
    """Build a token store from texts: mpirun -n 4 mpispeed data build -o corpus.h5 -t DIR corpus.jsonl.

    INPUTS are files of texts, lines of JSON, Parquet or Arrow, or folders of them. Every rank of a job runs this
    command; the store is the same for any number of them. After a kill the same command goes on.
    """
    _run(asked, tokenizer, field, documents, end=end, adds_special=special_tokens, parses_special=parse_special)


@click.command("import", cls=RankCommand)
@click.option("--tokenizer", "-t", metavar="byte|PATH", help="What made the tokens; its name and vocabulary are told.")
@click.option("--vocab-size", type=click.IntRange(1, 1 << 32), help="Tokens are smaller; without a tokenizer.")
@click.option("--field", default="input_ids", show_default=True, help="Entry or column that has the tokens.")
@click.option("--eos", "end", default="none", show_default=True, metavar="none|TOKEN",
              help="The token that ends documents, which the store tells; a number, or a token.")  # fmt: skip
@click.option("--append-eos", is_flag=True, help="Put it after each document; else it is there already.")
@_shared
def import_(
    tokenizer: str | None, vocab_size: int | None, field: str, append_eos: bool, end: str, **asked: Any
) -> None:
    """Build a token store from files that have tokens: mpispeed data import -o corpus.h5 corpus.bin.

    INPUTS are pairs NAME.bin and NAME.idx of Megatron, Parquet or Arrow, or lines of JSON, or folders of them.
    """
    _run(asked, tokenizer, field, "line", is_text=False, end=end, appends_end=append_eos, vocabulary=vocab_size)


@click.command(cls=RankCommand)
@click.option("--out", "-o", type=click.Path(path_type=Path), required=True, help="The store, a file .h5.")
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
def merge(out: Path, stores: tuple[Path, ...]) -> None:
    """Join STORES of one tokenizer to one, in this order; columns that all of them have come along."""
    from mpispeed.mesh.world import start
    from mpispeed.tokens_build.merging import merge as join_stores

    begun = time.monotonic()
    report = join_stores(start().comm, out, stores)
    if start().rank == 0 and not report.is_new:
        click.echo(f"{printable(str(out))} was complete already")
    elif start().rank == 0:
        for name in report.left_out:
            click.echo(
                f"the column {printable(name)} is not in all stores, or not of one type; it is left out", err=True
            )
        _tell(out, report.tokens, report.documents, report.rows, begun)


def _run(asked: dict[str, Any], tokenizer: str | None, field: str, documents: str, **further: Any) -> None:
    import torch

    from mpispeed.mesh.world import start
    from mpispeed.tokens_build.inputs import Reading
    from mpispeed.tokens_build.job import Request, build

    world, begun = start(), time.monotonic()
    request = Request(
        asked["out"], asked["inputs"], tokenizer, kind=asked["kind"], reading=Reading(field, documents),
        row=asked["row"] or 0, columns=tuple(name.strip() for name in asked["columns"].split(",") if name.strip()),
        part_bytes=asked["part_size"], skips_bad=asked["skip_bad"], threads=torch.get_num_threads(), **further,
    )  # fmt: skip
    report = build(world.comm, request, lambda line: click.echo(line, err=True))
    if world.rank:
        return
    if not report.is_new:
        click.echo(f"{printable(str(report.path))} was complete already")
        return
    if report.kept:
        click.echo(f"{report.kept} of {report.parts} parts were there already", err=True)
    if report.skipped:
        click.echo(f"{report.skipped} records were left out; the first: {report.first}", err=True)
    if report.empty:
        click.echo(f"{report.empty} documents without a token were left out", err=True)
    _tell(report.path, report.tokens, report.documents, report.rows, begun)


def _tell(path: Path, tokens: int, documents: int, rows: int, begun: float) -> None:
    packed = f" in {rows} rows" if rows else ""
    size = format_bytes(path.stat().st_size)
    took = format_duration(time.monotonic() - begun)
    click.echo(f"{printable(str(path))}: {tokens} tokens of {documents} documents{packed}, {size}, in {took}")
