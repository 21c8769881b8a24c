"""Parts of a store that is being built: one file each, which has its name when it is whole.

    tokens   [N] u2 or u4
    begins   [D + 1] u8: where each document begins in them; the last one is N
    rows     [R] u8: first document of each row, if documents are packed
    counts   [V] u8: how often each token is there, if the rarity of tokens is wanted
    facts    a line of JSON: counts, checksums, the build that it belongs to
    tail     magic, bytes of the facts, their checksum

All little endian. A part that was cut off or belongs to another build is as good as missing.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mpispeed.native.checksum import crc32c
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.packing import cut_long, pack

_TAIL = struct.Struct("<8sQI")
_MAGIC = b"MPSPART1"
_MOST_FACTS = 1 << 20

WINDOW_TOKENS = 16 << 20
"""Documents are packed among so many tokens at a time, which are in memory meanwhile."""

READ_BYTES = 4 << 20

Tokens = npt.NDArray[np.unsignedinteger]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Kind of the contents of a part.

    Attributes:
        dtype: "u2" or "u4".
        vocabulary: tokens are smaller.
        end: a token that is put after each document, if any.
        row: most tokens of a row; 0: documents are not packed.
        counts: how often each token is there is wanted.
    """

    dtype: str
    vocabulary: int
    end: int | None
    row: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sums over the documents of a part, or of all parts together.

    Attributes:
        skipped: records of its inputs that were left out.
        first: place and problem of the first of them.
        empty: documents without a token, which are left out too.
    """

    tokens: int
    documents: int
    rows: int
    skipped: int
    first: str
    empty: int


@dataclass(frozen=True, slots=True)
class PartFacts(Sizes):
    """Sizes of a part, its number, and the checksums of its arrays by their names."""

    number: int
    sums: Mapping[str, int]


def total_of(facts: Sequence[Sizes]) -> Sizes:
    """Sums over these parts; `first` is that of the first part that has one."""
    sums = {each.name: sum(getattr(one, each.name) for one in facts) for each in fields(Sizes) if each.name != "first"}
    return Sizes(first=next((one.first for one in facts if one.first), ""), **sums)


class PartWriter:
    """Writes documents one after the other; memory is bounded by what is packed at a time, and 8 bytes a document."""

    def __init__(self, file: BinaryIO, shape: Shape) -> None:
        self._file, self._shape = file, shape
        self._dtype = np.dtype(f"<{shape.dtype}")
        self._lengths: list[Numbers] = []
        self._rows: list[Numbers] = []
        self._window: list[tuple[Tokens, Numbers]] = []
        self._held = self._tokens = self._documents = self._sum = self.empty = 0
        self._counts = np.zeros(shape.vocabulary if shape.counts else 0, np.int64)

    def add(self, tokens: npt.NDArray[np.integer], lengths: Numbers) -> None:
        """Add documents.

        Shapes: tokens [N], integers of any type; lengths [D], their sum is N.

        Raises:
            BuildError: a token is not one of the vocabulary; the message has it.
        """
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self._shape.vocabulary:
                msg = f"there is the token {low if low < 0 else high}; the vocabulary has 0 to "
                msg += f"{self._shape.vocabulary - 1}"
                raise BuildError(msg)
        if self._shape.end is None:
            is_empty = lengths == 0
            self.empty += int(is_empty.sum())
            lengths = lengths[~is_empty]
            whole = tokens.astype(self._dtype)
        else:
            whole, lengths = _with_end(tokens, lengths, self._shape.end, self._dtype)
        if self._shape.counts:
            self._counts += np.bincount(whole, minlength=self._shape.vocabulary)
        if not self._shape.row:
            self._write(whole, lengths)
            return
        self._window.append((whole, lengths))
        self._held += len(whole)
        if self._held >= WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        """Write what waits, in packed order."""
        if not self._held:
            return
        tokens = np.concatenate([each for each, _ in self._window])
        pieces = cut_long(np.concatenate([each for _, each in self._window]), self._shape.row)
        self._window, self._held = [], 0
        order, firsts = pack(pieces, self._shape.row)
        starts = np.cumsum(pieces) - pieces
        self._rows.append(self._documents + firsts)
        lengths = pieces[order]
        step = READ_BYTES
        ends = np.cumsum(lengths)
        at = 0
        while at < len(order):  # pieces of memory, not another copy of all
            stop = max(at + 1, int(np.searchsorted(ends, (int(ends[at - 1]) if at else 0) + step, side="right")))
            self._write(_gathered(tokens, starts[order[at:stop]], lengths[at:stop]), lengths[at:stop])
            at = stop

    def _write(self, tokens: Tokens, lengths: Numbers) -> None:
        raw = np.ascontiguousarray(tokens).view(np.uint8)
        self._sum = crc32c(raw, self._sum)
        self._file.write(raw.data)
        self._lengths.append(lengths)
        self._tokens += len(tokens)
        self._documents += len(lengths)

    def finish(self, number: int, job: str, skipped: int, first: str) -> PartFacts:
        """Write what follows the tokens.

        Args:
            number: of the part.
            job: digest of the build.
            skipped: records of its inputs that were left out.
            first: the first of them, in words.
        """
        self._pack()
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(_joined(self._lengths))]).astype("<u8")
        rows = _joined(self._rows).astype("<u8")
        sums = {"tokens": self._sum}
        for name, values in (("begins", begins), ("rows", rows), ("counts", self._counts.astype("<u8"))):
            sums[name] = crc32c(values.view(np.uint8))
            self._file.write(values.data)
        facts = PartFacts(self._tokens, self._documents, len(rows), skipped, first, self.empty, number, sums)
        raw = json.dumps({**asdict(facts), "job": job, "vocabulary": len(self._counts)}).encode() + b"\n"
        self._file.write(raw + _TAIL.pack(_MAGIC, len(raw), crc32c(raw)))
        return facts


def _joined(arrays: list[Numbers]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def _with_end(
    tokens: npt.NDArray[np.integer], lengths: Numbers, end: int, dtype: np.dtype[Any]
) -> tuple[Tokens, Numbers]:
    """Documents with a token after each."""
    lengths = lengths + 1
    whole = np.empty(len(tokens) + len(lengths), dtype)
    ends = np.cumsum(lengths) - 1
    is_own = np.ones(len(whole), bool)
    is_own[ends] = False
    whole[is_own] = tokens
    whole[ends] = end
    return whole, lengths


def _gathered(tokens: Tokens, starts: Numbers, lengths: Numbers) -> Tokens:
    """Runs of `tokens` in another order."""
    ends = np.cumsum(lengths)
    index = np.arange(int(ends[-1])) + np.repeat(starts - ends + lengths, lengths)
    return tokens[index]


# -- reading -----------------------------------------------------------------------------------------------------------


class Part:
    """A whole part, read by position. Close it, or use it as a context manager.

    Attributes:
        facts: its sizes.
    """

    def __init__(self, path: Path, shape: Shape, job: str) -> None:
        """Open it.

        Raises:
            BuildError: it is not whole, or is of another build.
            OSError: it cannot be read.
        """
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self.facts = self._read_facts(shape, job)
        except BaseException:
            os.close(self._handle)
            raise

    def _read_facts(self, shape: Shape, job: str) -> PartFacts:
        size = os.fstat(self._handle).st_size
        problem = f"{self._path} is no whole part of this build; remove it, and build again"
        if size < _TAIL.size:
            raise BuildError(problem)
        magic, length, crc = _TAIL.unpack(os.pread(self._handle, _TAIL.size, size - _TAIL.size))
        if magic != _MAGIC or not 0 < length <= min(_MOST_FACTS, size - _TAIL.size):
            raise BuildError(problem)
        raw = os.pread(self._handle, length, size - _TAIL.size - length)
        if crc32c(raw) != crc:
            raise BuildError(problem)
        told = json.loads(raw)
        vocabulary = shape.vocabulary if shape.counts else 0
        if told.pop("job") != job or told.pop("vocabulary") != vocabulary:
            raise BuildError(problem)
        facts = PartFacts(**told)
        itemsize = int(shape.dtype[1:])
        self._dtype = np.dtype(f"<{shape.dtype}")
        self._begins = facts.tokens * itemsize
        self._rows = self._begins + 8 * (facts.documents + 1)
        self._counts = self._rows + 8 * facts.rows
        if self._counts + 8 * vocabulary + length + _TAIL.size != size:
            raise BuildError(problem)
        self._vocabulary = vocabulary
        return facts

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def tokens(self) -> Iterator[Tokens]:
        """All tokens, in pieces of bounded size; what does not have its checksum is a BuildError at the end."""
        crc, place = 0, 0
        while place < self._begins:
            raw = self._read(place, min(READ_BYTES, self._begins - place))
            crc = crc32c(raw, crc)
            yield np.frombuffer(raw, self._dtype)
            place += len(raw)
        self._check("tokens", crc)

    def begins(self) -> npt.NDArray[np.uint64]:
        """Where each document begins, and the end [D + 1]."""
        return self._numbers("begins", self._begins, self.facts.documents + 1)

    def rows(self) -> npt.NDArray[np.uint64]:
        """The first document of each row [R]."""
        return self._numbers("rows", self._rows, self.facts.rows)

    def counts(self) -> npt.NDArray[np.uint64]:
        """How often each token is there [V]; empty where it was not counted."""
        return self._numbers("counts", self._counts, self._vocabulary)

    def _numbers(self, name: str, place: int, count: int) -> npt.NDArray[np.uint64]:
        raw = self._read(place, 8 * count)
        self._check(name, crc32c(raw))
        return np.frombuffer(raw, "<u8")

    def _check(self, name: str, crc: int) -> None:
        if crc != self.facts.sums[name]:
            msg = f"{self._path} is damaged: its {name} do not have their checksum; remove it, and build again"
            raise BuildError(msg)

    def _read(self, place: int, count: int) -> bytearray:
        out = bytearray(count)
        done = 0
        while done < count:
            got = os.preadv(self._handle, [memoryview(out)[done:]], place + done)
            if not got:
                msg = f"{self._path} ends at byte {place + done}; remove it, and build again"
                raise BuildError(msg)
            done += got
        return out


def part_name(number: int) -> str:
    """Name of the file of a part."""
    return f"part-{number:07d}"


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block has come to its end, and is on the disk then."""
    working = path.with_name(f"{path.name}.tmp")
    handle = os.open(working, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "wb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    working.rename(path)
