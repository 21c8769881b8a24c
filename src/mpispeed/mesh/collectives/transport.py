"""Primitives that a backend implements, on flat tensors over one group of ranks, without checks and limits."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

EXCHANGE_TAG, ROLL_CALL_TAG = 32000, 32767
"""Tags of messages inside one verb, and of roll calls; the second is the largest that every MPI has."""

Poll = Callable[[], bool]
"""Asks without blocking whether something has happened."""

Comparison = Callable[[], tuple[int, int] | None]
"""Asks without blocking what a comparison has found: None while ranks are missing, then the least and greatest code."""

Source = Callable[[], int | None]
"""Asks without blocking whether a message has arrived: None until then, then the rank that sent it."""

Pairs = Sequence[tuple[torch.Tensor, int]]
"""Flat tensors with the rank they go to or come from."""


class Posted(NamedTuple):
    """A message under way: its polls, the buffers it needs until then, and the final copy to its destination."""

    polls: list[Poll]
    kept: object
    bring: Callable[[], object] | None = None


SPIN_NS = 50_000
"""How long a rank polls for the others before it sleeps: waking takes about as long."""


class Waiting(NamedTuple):
    """The way in which ranks of a group wait for each other.

    Attributes:
        ranks: world ranks of the members, for messages.
        spin_ns: how long to poll for others before sleeping.
        beat: called while others are late, every few milliseconds.
    """

    ranks: Sequence[int]
    spin_ns: int = SPIN_NS
    beat: Callable[[], object] = lambda: None


class Fast(abc.ABC):
    """A shortcut for ranks that share memory, with the bits of the ordered path.

    `op` is any but "avg", for dtypes as in `host_collectives`; `threads` add up.

    Attributes:
        limit_bytes: most that one rank brings: `x`, `full`, or `shard` of an all-gather.
    """

    limit_bytes = sys.maxsize

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine in place."""

    @abc.abstractmethod
    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float, threads: int) -> None:
        """Combine and keep this rank's shard."""

    @abc.abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Shards of all ranks in rank order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the shared memory."""


class Transport(abc.ABC):
    """Primitives over one group of ranks; MPI, one rank alone and simulated ranks implement them.

    Tensors are one-dimensional, contiguous, in host memory and at most `Limits.chunk_bytes` long.
    Collective over: the group, but for the point-to-point primitives.

    Attributes:
        rank: position of this rank.
        size: number of ranks.
        shares_memory: all ranks of the group are on one node.
        waiting: the way of ranks to wait for each other in memory that they share.
        moves: False where verbs only check and count, as in a dry run; then tensors may be on the meta device.
    """

    moves = True

    def __init__(self, rank: int, size: int, *, shares_memory: bool = True) -> None:
        self.rank, self.size, self.shares_memory = rank, size, shares_memory
        self.waiting = Waiting(range(size))

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
    def split(self, color: int, ranks: Sequence[int]) -> Transport:
        """The group of equal `color`, whose world ranks are `ranks`. Collective over: this group."""

    @abc.abstractmethod
    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> Transport:
        """The group of some ranks of this one, in the given order; `ranks` are their world ranks.

        Collective over: those ranks only; two groups that are made at the same time need different names.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release resources. Collective over: this group."""

    def fast(self, *, is_small: bool = False) -> Fast | None:
        """The shortcut of large tensors through shared memory, or that of small ones; None where ranks share none.

        The same answer on all ranks. Collective over: this group, at the first call for each.
        """
        del is_small
        return None


def arrival(transport: Transport) -> Poll:
    """Announce that this rank is here; the poll is true once all are. Not blocking."""
    comparison = transport.compare(0)
    return lambda: comparison() is not None
