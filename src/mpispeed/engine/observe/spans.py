"""Spans of this rank, by lanes, and their way to rank 0."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpispeed.base.device import current_stream, module_of
from mpispeed.engine.observe.passes import STEP
from mpispeed.record.layout import SPAN

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import Record
    from mpispeed.mesh.comm import Comm
    from mpispeed.native.block_io import Moved

MAIN, DEVICE, FILES = "main", "device", "swap files"
"""Lanes of a rank; those of communication in the background are called like the channel."""

WAIT = "wait for sums of gradients"


class Span(NamedTuple):
    """Something of `size` bytes in a global step; times are seconds of `time.perf_counter`."""

    lane: str
    name: str
    step: int
    begin: float
    end: float
    size: int = 0


class Spans:
    """Collects spans; threads of channels add theirs.

    Attributes:
        step: the global step of what is added.
        dropped: how many were left out.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """Args: `most` are kept; `device` has a lane of its own unless it is the host."""
        self.step = self.dropped = 0
        self._most, self._found = most, list[Span]()
        self._lanes: dict[int, str] = {threading.main_thread().ident or 0: MAIN}
        self._device = device if device.type != "cpu" else None
        self._queued: list[tuple[str, int, Any, Any]] = []
        self._anchor: tuple[float, Any] | None = None

    def add(self, name: str, begin: float, end: float, size: int = 0) -> None:
        """Add one of this thread, in the current step."""
        self._add(Span(self._lane(), name, self.step, begin, end, size))

    def read(self, record: Record) -> None:
        """Add a call of a verb, which has just ended on this thread."""
        begin = record.begin or time.perf_counter()
        name = f"{record.verb} {','.join(record.axes)}".strip()
        self.add(name, begin, begin + record.seconds, record.message_bytes)

    def _add(self, span: Span) -> None:
        if len(self._found) < self._most:
            self._found.append(span)
        else:
            self.dropped += 1

    def _lane(self) -> str:
        thread = threading.get_ident()
        if thread not in self._lanes:
            self._lanes[thread] = threading.current_thread().name.removeprefix("mpispeed-")
        return self._lanes[thread]

    def add_transfers(self, moved: Iterable[Moved]) -> None:
        """Add transfers of swap files, those that went on at a time on lanes beside each other."""
        steps = sorted((span.begin, span.step) for span in self._found if span.name == STEP)
        ends: list[float] = []
        for one in sorted(moved, key=lambda one: one.begin):
            before = bisect_right(steps, (one.begin, self.step))
            step = steps[max(0, before - 1)][1] if steps else self.step
            free = next((number for number, end in enumerate(ends) if end <= one.begin), len(ends))
            ends[free : free + 1] = [one.end]
            lane = FILES if free == 0 else f"{FILES} {free + 1}"
            self._add(Span(lane, "write" if one.is_write else "read", step, one.begin, one.end, one.nbytes))

    # -- passes, see `Passes` ----------------------------------------------------------------------------------------

    def begin(self, _: str) -> tuple[int, float, Any]:
        """The step, the time, and a mark in what is queued for the device."""
        return self.step, time.perf_counter(), self._mark()

    def end(self, name: str, token: tuple[int, float, Any]) -> None:
        """Add a pass."""
        step, begin, mark = token
        self._add(Span(MAIN, name, step, begin, time.perf_counter()))
        if mark is not None:
            self._queued.append((name, step, mark, self._mark()))

    def _mark(self) -> Any:
        if self._device is None:
            return None
        event = module_of(self._device).Event(enable_timing=True)
        event.record(current_stream(self._device))
        if self._anchor is None:
            event.synchronize()
            self._anchor = time.perf_counter(), event
        return event

    def all(self) -> list[Span]:
        """All spans. Waits for the device."""
        found = list(self._found)
        if self._anchor is None:
            return found
        at, anchor = self._anchor
        for name, step, *marks in self._queued[: self._most - len(found)]:
            marks[1].synchronize()
            begin, end = (at + 1e-3 * anchor.elapsed_time(mark) for mark in marks)
            found.append(Span(DEVICE, name, step, begin, end))
        return found


class Waits:
    """A context in which the main thread waits for sums of gradients, or carries them out itself."""

    def __init__(self, spans: Spans) -> None:
        self._spans, self._began = spans, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.add(WAIT, self._began, time.perf_counter())


def packed(spans: Sequence[Span], rank: int, offset_seconds: float) -> tuple[np.ndarray, list[str]]:
    """Spans as they are stored, with `offset_seconds` added to their times, and names by number."""
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != MAIN, lane))
    names = list(dict.fromkeys([*lanes, *(span.name for span in spans)]))
    numbers = {name: number for number, name in enumerate(names)}
    array = np.zeros(len(spans), SPAN)
    array["rank"] = rank
    for number, span in enumerate(spans):
        array[number] = (
            rank, numbers[span.lane], numbers[span.name], span.step, span.begin + offset_seconds,
            span.end + offset_seconds, span.size,
        )  # fmt: skip
    return array, names


def bring(comm: Comm, spans: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, list[str]] | None:
    """All ranks' spans and their names, on rank 0; None on others, whose memory no other rank needs to hold.

    Collective over: the group.
    """
    if comm.rank:
        _send(comm, "\n".join(names).encode())
        _send(comm, spans.tobytes())
        return None
    common = {name: number for number, name in enumerate(names)}
    found = [spans]
    for rank in range(1, comm.size):
        theirs = _recv(comm, rank).decode().split("\n")
        array = np.frombuffer(_recv(comm, rank), SPAN).copy()
        numbers = np.array([common.setdefault(name, len(common)) for name in theirs], np.uint32)
        if len(array):
            array["lane"], array["name"] = numbers[array["lane"]], numbers[array["name"]]
        found.append(array)
    return np.concatenate(found), list(common)


def _send(comm: Comm, data: bytes) -> None:
    comm.send(torch.tensor([len(data)], dtype=torch.int64), 0)
    if data:
        comm.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)


def _recv(comm: Comm, rank: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    comm.recv(length, rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    if len(data):
        comm.recv(data, rank)
    return data.numpy().tobytes()
