"""One call of a verb: what the journal and the ledger are told of it."""

from __future__ import annotations

import time
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING

from mpispeed.base.ledger_file import Kind
from mpispeed.mesh import ledger as ledgers
from mpispeed.mesh.journal import Record

if TYPE_CHECKING:
    import torch

    from mpispeed.mesh.comm import Comm


class Call:
    """A context around a verb. `peer` is a position in the group."""

    __slots__ = (
        "_begin", "_comm", "_is_even", "_kind", "_ledger", "_op", "_peer", "_row", "_sent_bytes", "_site", "_tag",
        "_tensor", "_verb",
    )  # fmt: skip

    def __init__(
        self,
        comm: Comm,
        verb: str,
        sent_bytes: int,
        tensor: torch.Tensor | None,
        op: str,
        peer: int,
        tag: int,
        kind: Kind,
        is_even: bool,
    ) -> None:
        self._comm, self._verb, self._sent_bytes, self._tensor = comm, verb, sent_bytes, tensor
        self._op, self._peer, self._tag, self._kind, self._is_even = op, peer, tag, kind, is_even

    def __enter__(self) -> None:
        comm = self._comm
        if comm.is_lane and comm.progress is not None:
            comm.progress.drain()
        ledger = self._ledger = ledgers.current() if comm.channel is not None else None
        self._site = ledgers.caller() if ledger is not None or comm.journal.wants_sites else ""
        self._row = self.note(ledger)
        self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if self._ledger is not None:
            self._ledger.end(self._row)
        self._comm.journal.enter(self.record(seconds))

    def post(self) -> int:
        """Tell of a message that is only posted; returns its row, which whoever finds it arrived has to end."""
        ledger = ledgers.current() if self._comm.channel is not None else None
        self._site = ledgers.caller() if ledger is not None or self._comm.journal.wants_sites else ""
        self._comm.journal.enter(self.record(0.0))
        row = self.note(ledger)
        if ledger is not None:
            ledger.post(row)
        return row

    def note(self, ledger: ledgers.Ledger | None) -> int:
        """Write the row of this call, or count it where there is no ledger."""
        comm, tensor = self._comm, self._tensor
        channel = comm.channel
        if channel is None:
            return ledgers.NO_ROW
        peer = comm.ranks[self._peer] if self._peer >= 0 else -1
        if ledger is None:
            ledgers.skip(channel, self._kind, peer, self._tag)
            return ledgers.NO_ROW
        return ledger.begin(
            channel,
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
        """What the journal is told."""
        comm, tensor = self._comm, self._tensor
        size = tensor.nbytes if tensor is not None else 0
        return Record(self._verb, comm.axes, comm.size, size, self._sent_bytes, seconds, self._site)


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Its name without the module: float32."""
    return str(dtype).removeprefix("torch.")
