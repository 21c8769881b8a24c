"""Documents of Megatron's pairs `NAME.bin` and `NAME.idx`: tokens that are there already.

What an index says is checked where it is used, and nothing of its size is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpispeed.base.plain import printable
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.index_layout import HEAD, MEGATRON_CODES, IndexFileError, PlainFile, read_head
from mpispeed.tokens_build.errors import BuildError, Faults
from mpispeed.tokens_build.inputs import (
    BATCH_BYTES,
    MOST_DOCUMENT_BYTES,
    Batch,
    Input,
    Reading,
    Slice,
    TokenRun,
    open_data,
    open_input,
)

_DOCUMENTS = 4096
"""Documents whose marks are read at a time."""

_MOST_ROWS = 1 << 24
"""Rows of a document."""


class _Pair:
    """A pair of files; documents are runs of rows between marks, or single rows where there are no marks."""

    def __init__(self, one: Input) -> None:
        open_input(one).close()
        open_data(one).close()
        name = one.path.removesuffix(".idx")
        self._index = PlainFile(Path(one.path))
        dtype, self.rows, self._marks = read_head(self._index, MEGATRON_CODES)
        if dtype.kind == "f":
            msg = f"{printable(one.path)} has rows of {dtype.name}, which are no tokens"
            raise IndexFileError(msg)
        self.data = MMapIndexedDataset(name, codes=MEGATRON_CODES)
        self.nbytes = one.data_size
        self.documents = self._marks - 1 if self._marks > 1 else self.rows
        if self._marks > 1 and (self.marks(0, 0)[0], self.marks(self.documents, self.documents)[0]) != (0, self.rows):
            msg = f"{printable(one.path)}: document marks do not go from 0 to its {self.rows} rows"
            raise IndexFileError(msg)

    def marks(self, begin: int, stop: int) -> npt.NDArray[np.int64]:
        """The first row of documents `begin` to `stop`, and the row after the last: stop - begin + 1 numbers."""
        if self._marks <= 1:
            return np.arange(begin, stop + 1, dtype=np.int64)
        place = HEAD.size + 12 * self.rows + 8 * begin
        marks = np.frombuffer(self._index.read(place, 8 * (stop - begin + 1)), "<i8").astype(np.int64)
        if int(marks[0]) < 0 or int(marks[-1]) > self.rows or (marks[1:] < marks[:-1]).any():
            msg = f"{self._index.path}: marks of documents {begin} to {stop} are not rows of it in ascending order"
            raise IndexFileError(msg)
        return marks


def itemsize(one: Input) -> int:
    """Bytes of a token.

    Raises:
        BuildError: the pair is damaged, or cannot be read.
    """
    try:
        return int(_Pair(one).data.dtype.itemsize)
    except (IndexFileError, OSError) as failure:
        raise BuildError(str(failure)) from failure


def cut(number: int, one: Input, reading: Reading, part_bytes: int) -> Iterator[Slice]:
    """Slices of equal numbers of documents, of about `part_bytes` each.

    Raises:
        BuildError: the pair is damaged, or cannot be read.
    """
    try:
        pair = _Pair(one)
    except (IndexFileError, OSError) as failure:
        raise BuildError(str(failure)) from failure
    step = max(1, pair.documents * part_bytes // max(1, pair.nbytes))
    for begin in range(0, pair.documents, step):
        stop = min(pair.documents, begin + step)
        yield Slice(number, begin, stop, pair.nbytes * (stop - begin) // pair.documents)


def read(one: Input, begin: int, stop: int, reading: Reading, faults: Faults) -> Iterator[Batch]:
    """Documents `begin` to `stop`.

    Raises:
        BuildError: the pair is damaged or has changed.
    """
    try:
        pair = _Pair(one)
        step = _DOCUMENTS
        while begin < stop:
            count = min(step, stop - begin)
            marks = pair.marks(begin, begin + count)
            if int(marks[-1] - marks[0]) > _MOST_ROWS:
                if count > 1:
                    step = count // 2
                    continue
                faults.bad(_place(one, begin), f"it has more than {_MOST_ROWS} rows, too many for one document")
            else:
                yield from _documents(one, pair, begin, marks, faults)
            begin += count
    except (IndexFileError, OSError) as failure:
        raise BuildError(str(failure)) from failure


def _place(one: Input, document: int) -> Callable[[], str]:
    return lambda: f"{printable(one.path)}, document {document}"


def _documents(one: Input, pair: _Pair, begin: int, marks: npt.NDArray[np.int64], faults: Faults) -> Iterator[TokenRun]:
    """Documents between `marks`, in runs of bounded size; the first has the number `begin`."""
    sizes = pair.data.read_sizes(int(marks[0]), int(marks[-1])).astype(np.int64)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[marks - marks[0]]
    lengths, item = np.diff(ends), pair.data.dtype.itemsize
    at = 0
    while at < len(lengths):
        if int(lengths[at]) * item > MOST_DOCUMENT_BYTES:
            faults.bad(_place(one, begin + at), f"it has {lengths[at]} tokens, too many for one document")
            at += 1
            continue
        end = max(at + 1, int(np.searchsorted(ends, int(ends[at]) + BATCH_BYTES // item, side="right")) - 1)
        tokens, _ = pair.data.read(int(marks[at]), int(marks[end]))
        yield TokenRun(tokens, lengths[at:end])
        at = end
