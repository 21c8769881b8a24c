"""One call of a verb, as the trace and the flight recorder see it."""

from __future__ import annotations

import time
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING

from mpispeed.base.recorder_file import Kind
from mpispeed.mesh.trace import recorder as recorders
from mpispeed.mesh.trace.comm_trace import Record

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.collectives.transport import Group


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
        if self._takes_turn:
            group.take_turn()
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
        self._group.comm_trace.enter(self.record(seconds))

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

    def record(self, seconds: float) -> Record:
        """The record for the trace."""
        group, tensor = self._group, self._tensor
        size = tensor.nbytes if tensor is not None else 0
        return Record(self._verb, group.axes, group.size, size, self._sent_bytes, seconds, self._site)


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the module: float32."""
    return str(dtype).removeprefix("torch.")
