"""`mpispeed data show` and `mpispeed data verify`.

Exit codes: 0 fine, 1 `verify`: damaged, 2 usage, or a file that is no token store, unfinished, or beyond reading.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes
from mpispeed.cli.ckpt_report import as_json_option, print_table, say
from mpispeed.tokens import layout, reader
from mpispeed.tokens.errors import NoTokenStore, TokenStoreError, UnfinishedStore
from mpispeed.tokens.positions import read_elements
from mpispeed.tokens.verify import Verdict
from mpispeed.tokens.verify import verify as verified
from mpispeed.tokens_build.work_folder import unfinished

_MOST_TOKENS = 1 << 20
"""Of a document that is shown."""

_path = click.argument("path", type=click.Path(path_type=Path))


@click.command()
@_path
@click.option("--document", "number", type=click.IntRange(min=0), help="Print the token ids of this document.")
@as_json_option
def show(path: Path, number: int | None, as_json: bool) -> None:
    """Show what is in a token store: sizes, tokenizer, columns, and other facts of its manifest.

    Of NAME.idx or NAME.bin, a pair of files of rows as analyze writes them: type, rows and values.
    """
    if path.suffix in (".idx", ".bin"):
        _show_rows(path, number, as_json)
        return
    handle = reader.open_file(path)
    try:
        found = reader.read_contents(path, handle)
        if number is not None:
            click.echo(" ".join(map(str, _document(path, handle, found.places, number))))
            return
        told = _told(path, handle, found)
    finally:
        os.close(handle)
    if as_json:
        click.echo(json.dumps(told, indent=1))
    else:
        _print(path, told)


def _show_rows(path: Path, number: int | None, as_json: bool) -> None:
    """What a pair of files of rows says of itself, and a row of it."""
    from mpispeed.curriculum import index_file  # imports torch

    if number is not None:
        data = index_file.opened(path)
        if number >= len(data):
            msg = f"{path} has no row {number}; it has {len(data)}, counted from 0"
            raise index_file.IndexFileError(msg)
        click.echo(" ".join(map(str, data.get(number, 0, min(data.size(number), _MOST_TOKENS)).tolist())))
        return
    told = {"file": str(path), **index_file.summary(path)}
    if as_json:
        click.echo(json.dumps(told, indent=1))
        return
    width = max(map(len, told))
    for label, value in told.items():
        say(f"{label:<{width}}  {value}")


def _document(path: Path, handle: int, places: layout.Places, number: int) -> list[int]:
    if number >= places.document_count:
        msg = f"{path} has no document {number}; it has {places.document_count}, counted from 0"
        raise TokenStoreError(msg)
    start, stop = map(int, read_elements(handle, places.tables[layout.DOCUMENTS], number, 2))
    if not start < stop <= places.token_count:
        msg = f"{path}: /documents is damaged at {number}: it does not increase"
        raise TokenStoreError(msg)
    ids: list[int] = read_elements(
        handle, places.tables[layout.TOKENS], start, min(stop - start, _MOST_TOKENS)
    ).tolist()
    return ids


def _told(path: Path, handle: int, found: reader.Contents) -> dict[str, Any]:
    places = found.places
    return {
        "file": str(path),
        "bytes": os.fstat(handle).st_size,
        "tokens": places.token_count,
        "documents": places.document_count,
        "rows": places.row_count,
        "dtype": places.dtype,
        "facts": dict(found.manifest.facts),
        "columns": {
            name: {"dtype": place.dtype, "facts": dict(found.columns[layout.column_table(name)].facts)}
            for name, place in places.columns.items()
        },
    }


def _print(path: Path, told: Mapping[str, Any]) -> None:
    tokens, documents, rows = told["tokens"], told["documents"], told["rows"]
    lines = [
        ("file", f"{path}, {format_bytes(told['bytes'])}"),
        ("tokens", f"{tokens} of {told['dtype']}"),
        ("documents", f"{documents}, {tokens / documents:.1f} tokens on average"),
    ]
    if rows is not None:
        lines.append(("rows", f"{rows}, {documents / rows:.1f} documents on average"))
    lines += [(printable(name, 40), _short(value)) for name, value in told["facts"].items()]
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        say(f"{label:<{width}}  {text}")
    if told["columns"]:
        click.echo()
        cells = [(name, one["dtype"], _short(one["facts"])) for name, one in told["columns"].items()]
        print_table(("column", "dtype", ""), cells)


def _short(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value), 200)


@click.command()
@_path
@click.option("--sample", type=click.IntRange(min=1), help="Only so many blocks of 4 MiB, chosen by chance.")
@click.option("--seed", type=int, default=0, show_default=True, help="With --sample, of the choice.")
@click.option("--threads", type=click.IntRange(1, 256), help="That read at the same time; by default one per core.")
@as_json_option
def verify(path: Path, sample: int | None, seed: int, threads: int | None, as_json: bool) -> None:
    """Compare a token store with its checksums, and its tables with each other."""
    try:
        found = verified(path, sample=sample, seed=seed, threads=threads or len(os.sched_getaffinity(0)))
    except NoTokenStore as failure:
        left = unfinished(path)
        if left is None:
            raise
        raise UnfinishedStore(left) from failure
    if as_json:
        click.echo(json.dumps({"file": str(path), "fine": found.is_fine, **vars(found)}, indent=1))
    else:
        _print_verdict(path, found)
    sys.exit(0 if found.is_fine else 1)


def _print_verdict(path: Path, found: Verdict) -> None:
    for problem in found.problems:
        say(f"{path}: {problem}", err=True)
    amount = f"{found.blocks} of {found.all_blocks} blocks ({format_bytes(found.nbytes)})"
    if found.is_fine:
        say(f"{path}: {amount} are as they were written")
    else:
        say(f"{path}: damaged; {amount} were read", err=True)
