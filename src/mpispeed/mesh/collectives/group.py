"""A group of ranks as algorithms see it: members, limits, scratch, the order of its calls, and their trace.

Traffic sums, the comms logger and the flight recorder read the trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.base.recorder_words import Kind
from mpispeed.base.units import format_bytes
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.recorder import CallSequence

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.device_path import DevicePath
    from mpispeed.mesh.collectives.transport import Transport

Axes = tuple[str, ...]


@dataclass(slots=True)
class Record:
    """One ended call of a verb on this rank.

    Units: `message_bytes` of the tensor that counts for the verb's size (the whole one of all_gather and
    reduce_scatter); `sent_bytes` to others by the ring formula; `seconds` inside the verb, waiting included; 0 for
    messages that were only posted; `begin` in seconds of `time.perf_counter`, 0 for those. `size` is the number of
    ranks of the group, `site` the caller: "file:line in function", empty unless a reader asked for it or the recorder
    is open.
    """

    verb: str
    axes: Axes
    size: int
    message_bytes: int
    sent_bytes: int
    seconds: float
    site: str = ""
    begin: float = 0.0


Reader = Callable[[Record], None]


@dataclass(slots=True)
class Entry:
    """Totals of one verb over one set of axes on this rank.

    Units: `bytes` sent to others by the ring formula; `seconds` spent inside the verb, waiting included.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CommTrace:
    """Counts verbs; records also go to `parent`, so that one trace can see all of a process."""

    def __init__(self, parent: CommTrace | None = None) -> None:
        self._parent = parent
        self._entries: dict[tuple[str, Axes], Entry] = {}
        self._lock = threading.Lock()
        self._readers: tuple[Reader, ...] = ()
        self._wants_sites = False

    @property
    def wants_sites(self) -> bool:
        """True if a reader of this trace or of its parents asked for call sites."""
        return self._wants_sites or (self._parent is not None and self._parent.wants_sites)

    def enter(self, record: Record) -> None:
        """Add one call of a verb."""
        with self._lock:
            entry = self._entries.setdefault((record.verb, record.axes), Entry())
            entry.count += 1
            entry.bytes += record.sent_bytes
            entry.seconds += record.seconds
        for reader in self._readers:
            reader(record)
        if self._parent is not None:
            self._parent.enter(record)

    def subscribe(self, reader: Reader, *, wants_sites: bool = False) -> Callable[[], None]:
        """Call `reader` with every record from now on, on the thread that makes it; returns what ends that."""
        with self._lock:
            self._readers = (*self._readers, reader)
            self._wants_sites |= wants_sites

        def end() -> None:
            with self._lock:
                self._readers = tuple(other for other in self._readers if other is not reader)

        return end

    def entries(self) -> dict[tuple[str, Axes], Entry]:
        """A copy of all entries."""
        with self._lock:
            return {key: Entry(e.count, e.bytes, e.seconds) for key, e in self._entries.items()}

    def reset(self) -> None:
        """Forget everything counted here; the parent keeps its own."""
        with self._lock:
            self._entries.clear()

    def total_bytes(self, verb: str | None = None) -> int:
        """Bytes sent by one verb, or by all."""
        return sum(e.bytes for (name, _), e in self.entries().items() if verb in (None, name))

    def summary(self) -> str:
        """A table for people, largest traffic first."""
        rows = sorted(self.entries().items(), key=lambda item: -item[1].bytes)
        lines = [f"{'verb':<16}{'axes':<20}{'calls':>10}{'sent':>14}{'seconds':>12}"]
        for (verb, axes), e in rows:
            lines.append(
                f"{verb:<16}{','.join(axes) or '-':<20}{e.count:>10}{format_bytes(e.bytes):>14}{e.seconds:>12.3f}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class Limits:
    """Limits of a group; groups made of it begin with equal ones.

    Attributes:
        chunk_bytes: largest message; keeps counts below 2^31 elements for MPI libraries that refuse more.
        window_bytes: scratch of the ordered reductions, per buffer; larger tensors pass through it in windows.
        fast_bytes: from this size on sums and gathers go through shared memory where ranks share it.
        one_shot_bytes: up to this size sums and gathers go through it with one meeting; 0: never.
        timeout_seconds: how long a started operation waits for its peers; None: for ever.
    """

    chunk_bytes: int = 1 << 30
    window_bytes: int = 64 << 20
    fast_bytes: int = 256 << 10
    one_shot_bytes: int = 256 << 10
    timeout_seconds: float | None = None


class Group:
    """The ranks of one transport; collectives and channels work on these.

    Attributes:
        transport: the primitives.
        ranks: world ranks of the members, of which this one is at `rank`.
        axes: names for the trace.
        reduction: "ordered" or "mpi".
        comm_trace: what calls enter.
        limits: sizes of messages and time-outs.
        sequence: the group in the flight recorder; None: it is not recorded.
        turn: on a channel, waits until operations started before have ended.
        device_path: how tensors of a device travel; None: through host memory.
        find_path: gives a `Comm` that was made of this group a path of its own, if it can; None: nothing was chosen.
    """

    device_path: DevicePath | None = None
    find_path: Callable[[Any], object] | None = None

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        axes: tuple[str, ...],
        reduction: str,
        comm_trace: CommTrace,
        *,
        limits: Limits | None = None,
        sequence: CallSequence | None = None,
        turn: Callable[[], None] | None = None,
    ) -> None:
        if reduction not in ("ordered", "mpi"):
            msg = f"reduction={reduction!r} is unknown; choose 'ordered' (same bits on any library) or 'mpi' (its own)"
            raise CommError(msg)
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.ranks, self.axes, self.reduction, self.comm_trace = ranks, axes, reduction, comm_trace
        self.limits, self.sequence, self.turn = limits or Limits(), sequence, turn
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}

    def __str__(self) -> str:
        return f"{','.join(self.axes) or 'a group'} ({self.size} rank{'s' if self.size > 1 else ''})"

    @property
    def threads(self) -> int:
        """Threads a local sum may use; beside a computing main thread only one."""
        return torch.get_num_threads() if self.turn is None else 1

    def scratch(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of this group that only grows. Shapes: [count]."""
        wanted = count * dtype.itemsize
        # One set per thread: channels run elsewhere, but a blocking verb may run beside a started send.
        key = (name, threading.get_ident())
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < wanted:
            with torch.inference_mode(False):  # it serves calls outside of that mode too
                kept = self._scratch[key] = torch.empty(wanted, dtype=torch.uint8)
        return kept[:wanted].view(dtype)

    def window_elements(self, dtype: torch.dtype) -> int:
        """Elements per rank and window so that a window of all ranks fits scratch and message limits."""
        return max(1, min(self.limits.window_bytes, self.limits.chunk_bytes) // (self.size * dtype.itemsize))

    def keeps_lead(self, device: torch.device) -> bool:
        """True if verbs on tensors of `device` make the host wait for nothing."""
        path = self.device_path
        return self.size == 1 or (path is not None and path.device == device and not path.waits_on_host)

    def close(self) -> None:
        """Release the path of devices, if there is one, and the transport. Collective over: this group."""
        path, self.device_path = self.device_path, None
        if path is not None:
            path.close()
        self.transport.close()

    def split(
        self,
        color: int,
        ranks: Sequence[int],
        axes: tuple[str, ...],
        *,
        reduction: str = "",
        comm_trace: CommTrace | None = None,
        turn: Callable[[], None] | None = None,
    ) -> Group:
        """The group of equal `color`, whose world ranks are `ranks`; reduction and trace are those of this one.

        Collective over: this group.
        """
        with self._noting("split"):
            made = self.transport.split(color, ranks)
        sequence = None if self.sequence is None else self.sequence.child(color, ",".join(axes), ranks)
        return Group(
            made, ranks, axes, reduction or self.reduction, comm_trace or self.comm_trace,
            limits=replace(self.limits), sequence=sequence, turn=turn,
        )  # fmt: skip

    def of_members(self, members: Sequence[int], name: str, axes: tuple[str, ...], *, reduction: str = "") -> Group:
        """The group of some ranks of this one, in the given order. `name` is the same on all of them.

        Collective over: those ranks only; two groups that are made at the same time need different names.
        """
        ranks = [self.ranks[member] for member in members]
        made = self.transport.of_members(members, ranks, name)
        sequence = None if self.sequence is None else CallSequence.root(name, ranks)
        return Group(
            made, ranks, axes, reduction or self.reduction, self.comm_trace,
            limits=replace(self.limits), sequence=sequence,
        )  # fmt: skip

    @contextmanager
    def _noting(self, verb: str) -> Iterator[None]:
        """Record the making of a group, which is collective although the trace counts no tensors."""
        recorder = recorders.current()
        row = recorders.NO_ROW
        if self.sequence is not None:
            if recorder is None:
                recorders.skip(self.sequence, Kind.COLLECTIVE)
            else:
                row = recorder.begin(self.sequence, Kind.COLLECTIVE, verb)
        try:
            yield
        finally:
            if recorder is not None and row != recorders.NO_ROW:
                recorder.end(row)


class Call:
    """A context around a verb. `peer` is a position in the group; on a channel it waits for its turn."""

    __slots__ = (
        "_begin",
        "_group",
        "_is_even",
        "_kind",
        "_op",
        "_peer",
        "_recorder",
        "_row",
        "_sent_bytes",
        "_site",
        "_tag",
        "_takes_turn",
        "_tensor",
        "_verb",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        verb: str,
        sent_bytes: int,
        tensor: torch.Tensor | None = None,
        op: str = "",
        *,
        peer: int = -1,
        tag: int = 0,
        kind: Kind = Kind.COLLECTIVE,
        is_even: bool = True,
    ) -> None:
        self._group, self._verb, self._sent_bytes, self._tensor = group, verb, sent_bytes, tensor
        self._op, self._peer, self._tag, self._kind, self._is_even = op, peer, tag, kind, is_even
        self._takes_turn = True

    def beside(self) -> Call:
        """This context without the wait for its turn, as messages need no turn."""
        self._takes_turn = False
        return self

    def __enter__(self) -> None:
        group = self._group
        if self._takes_turn and group.turn is not None:
            group.turn()
        recorder = self._recorder = recorders.current() if group.sequence is not None else None
        self._site = recorders.caller() if recorder is not None or group.comm_trace.wants_sites else ""
        self._row = self.note(recorder)
        self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if self._recorder is not None:
            self._recorder.end(self._row)
        self._group.comm_trace.enter(self.record(seconds, self._begin))

    def post(self) -> int:
        """Record a message that is only posted; returns its row, to be ended when it has arrived."""
        recorder = recorders.current() if self._group.sequence is not None else None
        self._site = recorders.caller() if recorder is not None or self._group.comm_trace.wants_sites else ""
        self._group.comm_trace.enter(self.record(0.0))
        row = self.note(recorder)
        if recorder is not None:
            recorder.post(row)
        return row

    def note(self, recorder: recorders.FlightRecorder | None) -> int:
        """Write the row of this call, or count it where there is no recorder."""
        group, tensor = self._group, self._tensor
        sequence = group.sequence
        if sequence is None:
            return recorders.NO_ROW
        peer = group.ranks[self._peer] if self._peer >= 0 else -1
        if recorder is None:
            recorders.skip(sequence, self._kind, peer, self._tag)
            return recorders.NO_ROW
        return recorder.begin(
            sequence,
            self._kind,
            self._verb,
            dtype=dtype_name(tensor.dtype) if tensor is not None and self._is_even else "",
            op=self._op,
            count=tensor.numel() if tensor is not None and self._is_even else 0,
            peer=peer,
            tag=self._tag,
            site=self._site,
        )

    def record(self, seconds: float, begin: float = 0.0) -> Record:
        """The record for the trace."""
        group, tensor = self._group, self._tensor
        size = tensor.nbytes if tensor is not None else 0
        return Record(self._verb, group.axes, group.size, size, self._sent_bytes, seconds, self._site, begin)


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the module: float32."""
    return str(dtype).removeprefix("torch.")
