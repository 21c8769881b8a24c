"""The index of a file of prompts: byte ranges with checksums, as plain values that ranks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

JSON_LINES, TEXT, TOKENS = "json lines", "text", "tokens"
"""Kinds of byte ranges of prompts."""

MOST_PROBLEMS = 5
"""A scan ends after so many wrong lines."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges of a file. Shapes: all (n,).

    Attributes:
        starts: int64, in bytes.
        sizes: int64, in bytes.
        checksums: uint32, CRC-32C of the bytes.
    """

    starts: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class Index:
    """The places of the prompts in their file: what a scan found.

    Attributes:
        size_bytes: of the file.
        digest: of all of its bytes, "blake2b:...".
        kind: of the byte ranges: JSON_LINES, TEXT or TOKENS.
        contents: one byte range for each prompt.
        counts: answers that are wanted to each prompt; 0 where the file does not say. Shapes: (n,).
        field: name of the entry, dataset or group of prompts.
        id_field: name of that of ids; None: prompts are called by their position.
        dtype: of token ids, as numpy spells it.
        ids: byte ranges of ids, of an HDF5 file that has them as texts.
        columns: ids and options of an HDF5 file that has them as numbers, by name.
        ignored: names of entries that are neither prompts nor ids nor options, at most 20 of them.
    """

    size_bytes: int
    digest: str
    kind: str
    contents: Spans
    counts: np.ndarray
    field: str
    id_field: str | None
    dtype: str = ""
    ids: Spans | None = None
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()


class SpanList:
    """Byte ranges while they are found."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, int]] = []
        self._done: list[np.ndarray] = []

    def add(self, start: int, size: int, checksum: int) -> None:
        """Add the next one."""
        self._found.append((start, size, checksum))
        if len(self._found) == 1 << 16:  # as objects of Python they take six times the memory
            self._pack()

    def _pack(self) -> None:
        self._done.append(np.array(self._found, np.int64).reshape(-1, 3))
        self._found = []

    def spans(self) -> Spans:
        """All of them."""
        self._pack()
        table = np.concatenate(self._done)
        return Spans(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.uint32))


class IdSet:
    """Ids as 64-bit hashes, to find those that are there twice in little memory."""

    def __init__(self) -> None:
        self._hashes: list[np.ndarray] = []
        self._found: list[int] = []

    def add(self, name: str) -> None:
        """Add the id of the next prompt."""
        self._found.append(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))
        if len(self._found) == 1 << 16:
            self._pack()

    def _pack(self) -> None:
        self._hashes.append(np.array(self._found, np.uint64))
        self._found = []

    def suspects(self) -> Iterable[tuple[int, int]]:
        """Pairs of prompts whose hashes are equal, by position; nearly always because their ids are."""
        self._pack()
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")
        (places,) = np.nonzero(hashes[order][1:] == hashes[order][:-1])
        return [(int(order[place]), int(order[place + 1])) for place in places[:MOST_PROBLEMS].tolist()]
