"""Recorder of a rank as a watchdog sees it: read while the rank writes it or after the rank has died."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.base import recorder_file as form
from mpispeed.base.recorder_words import Kind, Order, State

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "int16": 2,
    "uint16": 2, "float32": 4, "int32": 4, "uint32": 4, "float64": 8, "int64": 8, "uint64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """A group of ranks by its key; `ranks` are world ranks."""

    key: int
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row. `begin` is on this node's monotonic clock; `thread` 0 is the main one; for `is_posted` see ROW."""

    row: int
    comm: int
    seq: int
    sig: int
    begin: float
    is_over: bool
    count: int
    verb: str
    dtype: str
    op: str
    site: str
    label: str
    peer: int
    tag: int
    thread: int
    kind: Kind
    is_posted: bool

    @property
    def size_bytes(self) -> int:
        """Size of the message or of the collective's data."""
        return self.count * ITEM_BYTES.get(self.dtype, 1)

    def text(self, group: str = "") -> str:
        """The operation in words, without the place of the call: "all_reduce (sum) of 8 float32 over data"."""
        words = self.verb + (f" ({self.op})" if self.op else "")
        if self.dtype:
            words += f" of {self.count} {self.dtype}"
        if self.kind is Kind.SEND:
            words += f" to rank {self.peer}" + (f" with tag {self.tag}" if self.tag else "")
        elif self.kind is Kind.RECV:
            words += f" from rank {self.peer}" + (f" with tag {self.tag}" if self.tag else "")
        elif self.peer >= 0:
            words += f", root rank {self.peer},"
        if self.label:
            words += f" for {self.label}" if self.kind is Kind.GATE else f" ({self.label})"
        return words + (f" over {group}" if group else "")


class RecorderView:
    """The recorder of one rank. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Map the file for reading, and for orders.

        Raises:
            OSError: it is not there.
            ValueError: it is no recorder, or not one yet.
        """
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), form.FILE_BYTES)
        self._header = np.frombuffer(self._map, form.HEADER, 1)
        self._rows = np.frombuffer(self._map, form.ROW, form.ROWS, form.ROWS_AT)
        self._seen = np.zeros(form.ROWS, np.uint64)
        self._strings: list[str] = []
        self._strings_read = 0
        self.groups: dict[int, Group] = {}
        if self.field("magic") != form.MAGIC:
            msg = f"{path} is no flight recorder"
            raise ValueError(msg)
        self.rank, self.pid = int(self.field("rank")), int(self.field("pid"))

    def field(self, name: str) -> Any:
        """A number of the header."""
        return self._header[name][0]

    @property
    def state(self) -> State:
        """The rank's stage of life: starting, running, leaving or the like."""
        return State(int(self.field("state")))

    def news(self) -> list[Operation]:
        """Operations that have begun since the last call, in their order, and all that were unfinished then."""
        stamps = self._rows["stamp"].copy()
        fresh = np.nonzero((stamps != self._seen) & (stamps != 0))[0]
        copies = self._rows[fresh]
        is_whole = self._rows["stamp"][fresh] == stamps[fresh]
        self._seen[fresh[is_whole]] = stamps[fresh[is_whole]]
        self._read_strings()
        found = [self._operation(copy) for copy in copies[is_whole]]
        return sorted(found, key=lambda operation: operation.row)

    def under_way(self) -> list[Operation]:
        """Operations that have begun and not ended, in their order."""
        rows = self._rows[(self._rows["end"] == 0) & (self._rows["stamp"] != 0)]
        self._read_strings()
        return sorted((self._operation(row) for row in rows), key=lambda operation: operation.row)

    def blocked_since(self) -> float:
        """Begin of the main thread's present operation, on this node's monotonic clock; 0.0 if it is in none."""
        rows = self._rows
        is_in = (rows["end"] == 0) & (rows["stamp"] != 0) & (rows["thread"] == 0) & (rows["posted"] == 0)
        begins = rows["begin"][is_in & (rows["kind"] != int(Kind.GATE))]
        since = [float(begins.min())] if len(begins) else []
        waits = [wait for wait in (self.wait(), self.future()) if wait is not None]
        return min([*since, *(begin for row, begin in waits if self._is_under_way(row))], default=0.0)

    def _is_under_way(self, row: int) -> bool:
        found = self._rows[row % len(self._rows)]
        return bool(found["stamp"] == row + 1 and found["end"] == 0)

    def last(self, count: int) -> list[Operation]:
        """The last operations, the newest last."""
        stamps = self._rows["stamp"]
        order = np.argsort(stamps)[-count:]
        self._read_strings()
        return [self._operation(self._rows[at]) for at in order if stamps[at]]

    def wait(self) -> tuple[int, float] | None:
        """(row, since) of the started operation that the main thread waits for; None if it waits for none."""
        row = int(self.field("wait_row"))
        return (row - 1, float(self.field("wait_since"))) if row else None

    def future(self) -> tuple[int, float] | None:
        """(row, since) of the started operation that the main thread may wait for, unseen; None if there is none."""
        row = int(self.field("future_row"))
        return (row - 1, float(self.field("future_since"))) if row else None

    def words(self) -> str:
        """The last words of the rank, or ""."""
        return self._words(form.WORDS_AT)

    def stack(self) -> str:
        """The stack that the rank wrote when it was asked, innermost frame last; "" if it has not answered."""
        return self._words(form.STACK_AT) if self.field("answered") == self.field("asked") else ""

    def ask_for_stack(self) -> None:
        """Let the rank write where its main thread is."""
        self._header["asked"][0] = self.field("answered") + 1

    def set_looked(self, number: int) -> None:
        """Tell the rank that the state it showed before has been looked at."""
        self._header["looked"][0] = number

    def order(self, order: Order, code: int) -> None:
        """Send an order to the rank."""
        self._header["order_code"][0] = code
        self._header["order"][0] = int(order)

    def close(self) -> None:
        """Let go of the file; it is unmapped with the last view of it."""
        del self._header, self._rows

    # -- parts -----------------------------------------------------------------------------------------------------

    def _operation(self, row: np.void) -> Operation:
        verb, _, rest = self._text(row["what"]).partition("\t")
        dtype, _, op = rest.partition("\t")
        return Operation(
            int(row["stamp"]) - 1, int(row["comm"]), int(row["seq"]), int(row["sig"]), float(row["begin"]),
            bool(row["end"]), int(row["count"]), verb, dtype, op, self._text(row["site"]), self._text(row["label"]),
            int(row["peer"]), int(row["tag"]), int(row["thread"]), Kind(int(row["kind"])), bool(row["posted"]),
        )  # fmt: skip

    def _text(self, number: Any) -> str:
        return self._strings[int(number)] if int(number) < len(self._strings) else ""

    def _words(self, offset: int) -> str:
        size = int.from_bytes(self._map[offset : offset + 4], "little")
        return self._map[offset + 4 : offset + 4 + min(size, form.WORD_BYTES - 4)].decode(errors="replace")

    def _read_strings(self) -> None:
        end = int(self.field("strings_end"))
        while self._strings_read < end:
            start = form.STRINGS_AT + self._strings_read
            size = int.from_bytes(self._map[start : start + 2], "little")
            text = self._map[start + 2 : start + 2 + size].decode(errors="replace")
            self._strings.append(text)
            self._strings_read += 2 + size
            if text.startswith(form.COMM_MARK):
                key, name, ranks = text[1:].split("\t")
                self.groups[int(key, 16)] = Group(int(key, 16), name, form.ranks_of(ranks))


def find_recorders(folder: Path) -> list[Path]:
    """The recorders of a node's ranks, by rank."""
    return sorted(folder.glob("rank-*"), key=lambda path: int(path.name.partition("-")[2]))


def remove_recorders(folder: Path) -> None:
    """Remove the folder of a node whose ranks have ended."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    if folder.is_dir():
        os.rmdir(folder)  # noqa: PTH106  a failure has to be seen, but rmdir of Path says the same
