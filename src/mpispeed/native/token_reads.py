"""Rows of unsigned integers read from a file by position, and widened straight into a matrix of torch.

`read_rows` is compiled; `read_rows_reference` is the same by numpy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpispeed.native import status

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAST_END, _NO_PLACE = -1, -2
_NO_LABELS = (0, 0, 0)
_WIDE = {torch.int32: 4, torch.int64: 8}
_KINDS: dict[int, np.dtype] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class FileTable:
    """Unsigned integers that lie one after the other in an open file.

    Attributes:
        handle: the descriptor.
        offset: of the first one, in bytes from the start of the file.
        count: how many.
        itemsize: bytes of one: 1, 2, 4 or 8.
    """

    handle: int
    offset: int
    count: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Labels:
    """A second matrix that is filled from the same bytes.

    Attributes:
        out: of the shape and dtype of the first.
        shift: element i of a row is what stands so many elements behind element i of the first.
        fill: what stands where nothing was read.
    """

    out: torch.Tensor
    shift: int = 1
    fill: int = -100


class PastEnd(ValueError):
    """A row is not within its table, or the file ends within it. `row` is its number."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def read_rows(
    table: FileTable,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    out: torch.Tensor,
    *,
    fill: int = 0,
    labels: Labels | None = None,
) -> None:
    """Read a run of elements for each row of `out`; what is longer is cut, what is shorter is filled up.

    Rows that the kernel has not in memory are read from the disk at once. The interpreter lock is released.

    Args:
        table: where to read.
        starts: first element of each run, [B].
        counts: elements of each run, [B].
        out: int64 or int32, contiguous on the host, [B, L]. Values beyond its dtype are cut to its bits.
        fill: what stands behind a run.
        labels: another matrix that is filled as well.

    Raises:
        ValueError: shapes or dtypes do not fit.
        PastEnd: a run is not within the table or the file; what `out` has then is undefined.
        OSError: the file cannot be read.
    """
    module = status.compiled("token_reads")
    starts, counts = _checked(table, starts, counts, out, labels)
    if module is None:
        _read_by_numpy(table, starts, counts, out, fill, labels)
        return
    code, row = module.read(
        (table.handle, table.offset, table.count, table.itemsize),
        starts,
        counts,
        out.shape[1],
        _WIDE[out.dtype],
        out.data_ptr(),
        fill,
        *((labels.out.data_ptr(), labels.fill, labels.shift) if labels is not None else _NO_LABELS),
    )
    if code > 0:
        raise OSError(code, os.strerror(code))
    if code:
        raise _past_end(table, code, row, starts, counts)


def read_rows_reference(
    table: FileTable,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    out: torch.Tensor,
    *,
    fill: int = 0,
    labels: Labels | None = None,
) -> None:
    """The same as `read_rows`, by numpy."""
    starts, counts = _checked(table, starts, counts, out, labels)
    _read_by_numpy(table, starts, counts, out, fill, labels)


def _read_by_numpy(
    table: FileTable,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    out: torch.Tensor,
    fill: int,
    labels: Labels | None,
) -> None:
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if start < 0 or count < 0 or start + count > table.count:
            raise _past_end(table, _NO_PLACE, row, starts, counts)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        raw = os.pread(table.handle, count * table.itemsize, table.offset + start * table.itemsize)
        if len(raw) < count * table.itemsize:
            raise _past_end(table, _PAST_END, row, starts, counts)
        found = np.frombuffer(raw, _KINDS[table.itemsize])
        _fill_row(out[row].numpy(), found, fill)
        if labels is not None:
            _fill_row(labels.out[row].numpy(), found[labels.shift :], labels.fill)


def _fill_row(row: np.ndarray, found: np.ndarray, fill: int) -> None:
    kept = min(len(row), len(found))
    row[:kept] = found[:kept].astype(row.dtype)
    row[kept:] = fill


def _checked(
    table: FileTable, starts: np.ndarray, counts: np.ndarray, out: torch.Tensor, labels: Labels | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and counts as rows of int64; quick where all is well, since this is done for every batch."""
    for matrix in (out,) if labels is None else (out, labels.out):
        if matrix.dtype not in _WIDE or matrix.dtype != out.dtype or matrix.shape != out.shape or matrix.ndim != 2:
            msg = f"read_rows: {matrix.dtype} {tuple(matrix.shape)} cannot be filled; pass int64 or int32 [B, L], alike"
            raise ValueError(msg)
        if not matrix.is_contiguous() or not matrix.is_cpu:
            status.check_tensors("read_rows", {"out": matrix})  # which says it
    if labels is not None and labels.shift < 0:
        msg = f"read_rows: shift is {labels.shift}; pass 0 or more"
        raise ValueError(msg)
    if table.itemsize not in _KINDS:
        msg = f"read_rows: elements of {table.itemsize} bytes cannot be read; 1, 2, 4 and 8 can"
        raise ValueError(msg)
    starts, counts = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(counts, np.int64)
    if not starts.shape == counts.shape == out.shape[:1]:
        msg = f"read_rows: {starts.shape} starts and {counts.shape} counts do not fit {out.shape[0]} rows"
        raise ValueError(msg)
    return starts, counts


def _past_end(table: FileTable, code: int, row: int, starts: np.ndarray, counts: np.ndarray) -> PastEnd:
    where = f"elements {starts[row]} to {int(starts[row]) + int(counts[row])}"
    if code == _NO_PLACE:
        return PastEnd(row, f"{where} are asked for of a table with {table.count}")
    return PastEnd(row, f"the file ends within {where} of a table")
