"""The parts of a run record: an HDF5 file laid out with reserved space, which is then written by plain writes.

    /            attributes: format, version, run (an id), started (seconds since 1970), host
    /facts/NAME  uint8[n], JSON: what is known at the start; attribute: crc32c of the text
    /rows        ROW[capacity]: points of series
    /names       uint8[capacity]: names of series and spans, UTF-8 lines; the number of a line is the number in /rows
    /notes       uint8[capacity]: what happened, JSON lines
    /spans       SPAN[capacity]: what ran when
    /state       SLOT[2]: how much of the tables is there

All datasets are contiguous, without filters, at offsets that do not change, little endian. HDF5's own data is complete
when the file gets its name and is never touched again: whatever a writer leaves, HDF5 opens the file.

A writer appends to tables first and then writes one of the two slots of /state, in turn. A slot has counts and
checksums of all that was written until then, and a checksum of itself. The valid one with the higher sequence number
tells what is there; what lies behind its counts is not proven.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.ckpt.format.hdf5 import Builder
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "mpispeed run record"
VERSION = 1
FILE_MODE = 0o600
SUFFIX = ".h5"

ROW = np.dtype(
    [("series", "<u4"), ("rank", "<u4"), ("step", "<u8"), ("samples", "<u8"), ("time", "<f8"), ("value", "<f8")]
)
"""A point: number of the series, rank it is of, step and samples of the run so far, seconds since 1970, value."""

SPAN = np.dtype(
    [
        ("rank", "<u4"),
        ("lane", "<u4"),
        ("name", "<u4"),
        ("step", "<u4"),
        ("begin", "<f8"),
        ("end", "<f8"),
        ("bytes", "<u8"),
    ]
)
"""What ran: on which rank and lane (numbers of names), number of its name, step, seconds since 1970, bytes moved."""

TABLES: Mapping[str, np.dtype] = MappingProxyType(
    {"rows": ROW, "names": np.dtype("u1"), "notes": np.dtype("u1"), "spans": SPAN}
)
"""What is appended to, in the order in which it is written."""

SLOT = np.dtype(
    [
        ("sequence", "<u8"),
        *((name, "<u8") for name in TABLES),
        ("dropped", "<u8"),
        ("ended", "<u4"),
        *((f"{name}_checksum", "<u4") for name in TABLES),
        ("checksum", "<u4"),
    ]
)
"""Sequence number, from 1; elements of each table; rows that were lost on the way to the file; 1 once the writer has
closed the file; CRC-32C of the elements of each table; CRC-32C of the slot before this."""

SLOTS = 2
STATE, FACTS = "state", "facts"
FACT_CHECKSUM = "crc32c"
"""Attribute of a fact: CRC-32C of its text."""

RESERVED: Mapping[str, int] = MappingProxyType({"rows": 65536, "names": 32 << 10, "notes": 128 << 10, "spans": 1024})
"""Elements of each table in a new file."""

MOST_FACT_BYTES = 16 << 20
MOST_NAME_BYTES = 1024
MOST_NOTE_BYTES = 64 << 10
"""A writer cuts off what is longer, readers may refuse it."""


@dataclass(frozen=True, slots=True)
class State:
    """Counts and checksums of what is in the tables of a record.

    Attributes:
        sequence: grows with each flush.
        counts: elements of each table.
        checksums: CRC-32C of these elements.
        dropped: rows that were lost, because the file system was slower than the run for long.
        is_ended: the writer has closed the file.
    """

    sequence: int = 0
    counts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    checksums: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    dropped: int = 0
    is_ended: bool = False

    def packed(self) -> bytes:
        """The slot of /state."""
        slot = np.zeros((), SLOT)
        slot["sequence"], slot["dropped"], slot["ended"] = self.sequence, self.dropped, self.is_ended
        for name in TABLES:
            slot[name], slot[f"{name}_checksum"] = self.counts[name], self.checksums[name]
        slot["checksum"] = _checksum(slot.tobytes())
        return slot.tobytes()

    @property
    def place(self) -> int:
        """Number of the slot that this state is written to."""
        return self.sequence % SLOTS


def latest_state(raw: bytes) -> State | None:
    """The last valid state in the bytes of /state; None if there is none, as in a file that was only laid out."""
    slots = np.frombuffer(raw[: SLOTS * SLOT.itemsize], SLOT)
    valid = [slot for slot in slots if slot["sequence"] and _checksum(slot.tobytes()) == slot["checksum"]]
    if not valid:
        return None
    slot = max(valid, key=lambda slot: int(slot["sequence"]))
    return State(
        int(slot["sequence"]),
        {name: int(slot[name]) for name in TABLES},
        {name: int(slot[f"{name}_checksum"]) for name in TABLES},
        int(slot["dropped"]),
        bool(slot["ended"]),
    )


def _checksum(slot: bytes) -> int:
    return crc32c(slot[: SLOT.itemsize - SLOT["checksum"].itemsize])


@dataclass(frozen=True, slots=True)
class Places:
    """Offsets and sizes of the datasets of a file.

    Attributes:
        offsets: of the tables and of /state, in bytes.
        capacity: elements of each table.
    """

    offsets: Mapping[str, int]
    capacity: Mapping[str, int]


def lay_out(
    path: Path, attributes: Mapping[str, Any], facts: Mapping[str, bytes], capacity: Mapping[str, int]
) -> Places:
    """Make a file with empty tables, for its owner alone; its space is reserved where the file system can do that.

    Args:
        path: a file that is not there yet; whoever reads it meanwhile finds it incomplete.
        attributes: of the file, beside its format.
        facts: JSON texts by name.
        capacity: elements of each table, at least 1.

    Raises:
        OSError: the file exists, there is no room for it, or the file system refuses.
    """
    with Builder(path, mode=FILE_MODE) as builder:
        for name, value in {"format": FORMAT, "version": VERSION, **attributes}.items():
            builder.attribute(builder.root, name, value)
        group = builder.group(builder.root, FACTS)
        for name, text in facts.items():
            made = builder.array(group, name, np.frombuffer(text, np.uint8))
            builder.attribute(made, FACT_CHECKSUM, crc32c(text))
        offsets = {name: builder.reserved(builder.root, name, capacity[name], kind) for name, kind in TABLES.items()}
        offsets[STATE] = builder.reserved(builder.root, STATE, SLOTS, SLOT)
    return Places(offsets, dict(capacity))


def fact(value: Any) -> bytes:
    """The text of a fact; what JSON does not know becomes text.

    Raises:
        ValueError: it is longer than readers take.
    """
    text = json.dumps(value, default=str, sort_keys=False).encode()
    if len(text) > MOST_FACT_BYTES:
        msg = f"a fact of {len(text)} bytes is longer than {MOST_FACT_BYTES}"
        raise ValueError(msg)
    return text
