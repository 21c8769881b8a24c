"""A group of ranks as algorithms see it: members, limits, scratch, and unchecked primitives on flat tensors."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.work import Poll
from mpispeed.mesh.trace.comm_trace import CommTrace
from mpispeed.mesh.trace.recorder import CallSequence

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK_BYTES = 1 << 30
"""Largest message; keeps counts below 2^31 elements for MPI libraries that refuse more."""

WINDOW_BYTES = 64 << 20
"""Scratch of the ordered reductions, per buffer; larger tensors pass through it in windows."""

FAST_BYTES = 1 << 20
"""From this size on ordered sums go through shared memory where ranks share it."""

Comparison = Callable[[], tuple[int, int] | None]
"""Asks without blocking what a comparison has found: None while ranks are missing, then the least and greatest code."""

Source = Callable[[], int | None]
"""Asks without blocking whether a message has arrived: None until then, then the rank that sent it."""

Pairs = Sequence[tuple[torch.Tensor, int]]
"""Flat tensors with the rank they go to or come from."""


class Fast(abc.ABC):
    """A shortcut for ranks that share memory, with the same bits as the ordered path."""

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor, scale: float) -> None:
        """Sum in place."""

    @abc.abstractmethod
    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, scale: float) -> None:
        """Sum and keep this rank's shard."""

    @abc.abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Shards of all ranks in rank order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the shared memory."""


class Transport(abc.ABC):
    """Primitives over one group of ranks; MPI, one rank alone and simulated ranks implement them.

    Tensors are one-dimensional, contiguous, in host memory and at most `Group.chunk_bytes` long.
    Collective over: the group, but for the point-to-point primitives.
    """

    @abc.abstractmethod
    def alltoall(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """All-to-all of equal parts."""

    @abc.abstractmethod
    def allgather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """All-gather of equal parts; `shard` may be the own slice of `out`."""

    @abc.abstractmethod
    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """In place, by the transport's own order."""

    @abc.abstractmethod
    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """In place on `root`."""

    @abc.abstractmethod
    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Equal shards; `shard` does not overlap `full`."""

    @abc.abstractmethod
    def library_broadcast(self, x: torch.Tensor, root: int) -> None:
        """From `root` to all."""

    @abc.abstractmethod
    def exchange_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """Point-to-point messages, all at once."""

    @abc.abstractmethod
    def library_send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """One message."""

    @abc.abstractmethod
    def library_recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """One message."""

    @abc.abstractmethod
    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Poll:
        """One message, not waited for."""

    @abc.abstractmethod
    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Poll:
        """One message, not waited for."""

    @abc.abstractmethod
    def post_recv_any(self, x: torch.Tensor, tag: int) -> Source:
        """One message of whichever rank sends one with this tag first, not waited for."""

    @abc.abstractmethod
    def library_barrier(self) -> None:
        """Barrier."""

    @abc.abstractmethod
    def library_share(self, obj: Any, root: int) -> Any:
        """One small object from `root`."""

    @abc.abstractmethod
    def library_gather_objects(self, obj: Any) -> list[Any]:
        """One small object of each rank."""

    @abc.abstractmethod
    def compare(self, code: int) -> Comparison:
        """Announce that this rank is here with `code`, 0 <= code < 2^63. Not blocking."""

    @abc.abstractmethod
    def split(self, color: int, ranks: Sequence[int], axes: tuple[str, ...]) -> Self:
        """The group of equal `color`, whose world ranks are `ranks`. Collective over: this group."""

    @abc.abstractmethod
    def of_members(self, members: Sequence[int], name: str, axes: tuple[str, ...]) -> Self:
        """The group of some ranks of this one, in the given order. `name` is the same on all of them.

        Collective over: those ranks only; two groups that are made at the same time need different names.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release resources. Collective over: this group."""


class Group(Transport):
    """A group of ranks for algorithms: its members, limits and scratch beside the primitives."""

    def __init__(
        self, rank: int, ranks: Sequence[int], axes: tuple[str, ...], reduction: str, comm_trace: CommTrace
    ) -> None:
        if reduction not in ("ordered", "mpi"):
            msg = f"reduction={reduction!r} is unknown; choose 'ordered' (same bits on any library) or 'mpi' (its own)"
            raise CommError(msg)
        self.rank, self.size = rank, len(ranks)
        self.ranks, self.axes = ranks, axes
        self.reduction, self.comm_trace = reduction, comm_trace
        self.chunk_bytes, self.window_bytes, self.fast_bytes = CHUNK_BYTES, WINDOW_BYTES, FAST_BYTES
        self.timeout_seconds: float | None = None
        self.is_channel = False
        self.sequence: CallSequence | None = None  # None: not in the recorder
        self.shares_memory = True  # all ranks of the group are on one node
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}

    def __str__(self) -> str:
        return f"{','.join(self.axes) or 'a group'} ({self.size} rank{'s' if self.size > 1 else ''})"

    def inherit(self, parent: Group) -> Self:
        """Take limits and time-outs from the parent group."""
        self.chunk_bytes, self.window_bytes = parent.chunk_bytes, parent.window_bytes
        self.fast_bytes, self.timeout_seconds = parent.fast_bytes, parent.timeout_seconds
        return self

    @property
    def threads(self) -> int:
        """Threads a local sum may use; beside a computing main thread only one."""
        return 1 if self.is_channel else torch.get_num_threads()

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

    def duplicate(self) -> Self:
        """The same group with message traffic of its own. Collective over: this group."""
        return self.split(0, self.ranks, self.axes)

    def arrive(self) -> Poll:
        """Announce that this rank is here; the poll is true once all are. Not blocking."""
        comparison = self.compare(0)
        return lambda: comparison() is not None

    def window_elements(self, dtype: torch.dtype) -> int:
        """Elements per rank and window so that a window of all ranks fits scratch and message limits."""
        return max(1, min(self.window_bytes, self.chunk_bytes) // (self.size * dtype.itemsize))

    @abc.abstractmethod
    def take_turn(self) -> None:
        """On a channel, wait until operations started before have ended."""

    def fast(self) -> Fast | None:
        """The shared-memory shortcut, if all ranks of the group share memory; the same answer on all of them.

        Collective over: this group, at the first call.
        """
        return None
