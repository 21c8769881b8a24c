"""Check of a file of results: its tables against each other. It has no checksums. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.ckpt.format import kinds
from mpispeed.generation.answers import PENDING, REASONS
from mpispeed.generation.hdf5_tables import REFERENCE, Heap, Table, Tables
from mpispeed.generation.result_files import read_identity

_BLOCK = 1 << 16
"""Elements that are read at a time."""
_MOST_TEXT_BYTES = 64 << 20
_TEXTS = ("id", "text", "error")


@dataclass
class Check:
    """The outcome.

    Attributes:
        problems: a sentence for each table that is not as it has to be.
        requests: answers that are wanted.
        answered: of them.
        settings: of the job.
    """

    problems: list[str] = field(default_factory=list)
    requests: int = 0
    answered: int = 0
    settings: dict[str, object] = field(default_factory=dict)


def check(path: Path, *, is_quick: bool = False) -> Check:
    """Look at all tables of a file of results; with `is_quick` at its attributes alone.

    Raises:
        OtherJob: it is no file of results, or of a later version.
        OSError: it cannot be read.
    """
    identity, numbers = read_identity(path)
    found = Check([], identity.requests, numbers["answered"], dict(identity.settings))
    if is_quick:
        return found
    with kinds.opened(path) as file, path.open("rb") as raw:
        try:
            tables = Tables(raw.fileno(), os.fstat(raw.fileno()).st_size, file)
        except (ValueError, RuntimeError) as failure:
            found.problems.append(_said(failure))
            return found
        for name, count, dtype in _wanted(identity.requests):
            try:
                _check_table(tables.table(tables.root, name), count, dtype, tables.size_bytes)
            except (ValueError, KeyError, OSError, RuntimeError) as failure:
                found.problems.append(f"/{name}: {_said(failure)}")
        if not found.problems:
            found.problems += _disagreements(tables, numbers)
    return found


def _wanted(requests: int) -> Iterator[tuple[str, int | None, str]]:
    """Name, elements and dtype of all tables; of tokens the offsets say how many there are."""
    for name in _TEXTS:
        yield name, requests, ""
    yield "prompt", requests, "<i8"
    yield "sample", requests, "<i4"
    yield "finish_reason", requests, "|u1"
    yield "prompt_tokens", requests, "<i4"
    yield "offsets", requests + 1, "<i8"
    yield "tokens", None, "<i4"


def _check_table(table: Table, count: int | None, dtype: str, size_bytes: int) -> None:
    wanted = np.dtype(dtype) if dtype else REFERENCE
    if table.dtype != wanted or count not in (None, table.count):
        msg = f"it has {table.count} elements of type {table.dtype}; expected {count} of {wanted}"
        raise ValueError(msg)
    if dtype:
        return
    heap = Heap(table.handle, size_bytes, table.name, _MOST_TEXT_BYTES)
    for first in range(0, table.count, _BLOCK):
        for row in table.read(first, min(table.count, first + _BLOCK)):
            heap.text(*row.item())[1].decode()


def _disagreements(tables: Tables, numbers: dict[str, int]) -> Iterator[str]:
    offsets, reasons, tokens = (tables.table(tables.root, name) for name in ("offsets", "finish_reason", "tokens"))
    cuts, codes = offsets.read(), reasons.read()
    if cuts[0] != 0 or (np.diff(cuts) < 0).any() or cuts[-1] != tokens.count:
        yield f"/offsets do not grow from 0 to {tokens.count}, the number of tokens"
    if codes.size and int(codes.max()) >= len(REASONS):
        yield f"/finish_reason has the code {codes.max()}; the last known one is {len(REASONS) - 1}"
    answered = int((codes != PENDING).sum())
    if answered != numbers["answered"] or numbers["complete"] != (answered == len(codes)):
        yield f"{answered} of {len(codes)} requests have an answer, and the file says {numbers['answered']}"


def _said(failure: Exception) -> str:
    text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
    return printable(str(text), 300)
