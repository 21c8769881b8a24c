"""What a transport offers to the verbs: primitives on flat tensors that need no checks of their own."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.mesh.work import Poll

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

Comparison = Callable[[], tuple[int, int] | None]
"""Asks without blocking what a comparison has found: None while ranks are missing, then the least and greatest code."""

Pairs = Sequence[tuple[torch.Tensor, int]]
"""Flat tensors with the rank they go to or come from."""


class Fast(abc.ABC):
    """A shortcut for ranks that share memory, with the same bits as the ordered path."""

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor, scale: float) -> None:
        """Sum in place."""

    @abc.abstractmethod
    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, scale: float) -> None:
        """Sum and keep the own cut."""

    @abc.abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Everyone's shard in rank order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the shared memory back."""


class Transport(abc.ABC):
    """Primitives over one group of ranks.

    Tensors are one-dimensional, contiguous, in host memory and at most `Comm.chunk_bytes` long.
    Collective over: the group, but for the point-to-point primitives.
    """

    @abc.abstractmethod
    def swap_equal(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """All-to-all of equal parts."""

    @abc.abstractmethod
    def gather_equal(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """All-gather of equal parts; `shard` may be the own slice of `out`."""

    @abc.abstractmethod
    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """In place, by the transport's own order."""

    @abc.abstractmethod
    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """In place on `root`."""

    @abc.abstractmethod
    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Equal cuts; `shard` does not overlap `full`."""

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
    def library_barrier(self) -> None:
        """Meet."""

    @abc.abstractmethod
    def library_share(self, obj: Any, root: int) -> Any:
        """One small object."""

    @abc.abstractmethod
    def library_gather_objects(self, obj: Any) -> list[Any]:
        """One small object of each."""

    def arrive(self) -> Poll:
        """Say that this rank is here; the poll tells whether all are. Not blocking."""
        comparison = self.compare(0)
        return lambda: comparison() is not None

    @abc.abstractmethod
    def compare(self, code: int) -> Comparison:
        """Say that this rank is here with `code`, 0 <= code < 2^63. Not blocking."""

    @abc.abstractmethod
    def duplicate(self) -> Comm:
        """The same group with message traffic of its own. Collective over: this group."""

    @abc.abstractmethod
    def split(self, color: int, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        """The group of equal `color`, whose world ranks are `ranks`. Collective over: this group."""

    def grid_coords(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """This rank's place on the library's own Cartesian grid; None where there is no such library."""
        del sizes
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give resources back. Collective over: this group."""
