"""A way for tensors of a device between ranks that never passes the host; a group without one stages them."""

from __future__ import annotations

import abc

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.transport import Pairs, Posted
from mpispeed.native import device_sum

SCRATCH_BYTES = 64 << 20
"""Most that a sum holds of other ranks' parts at a time."""

SMALL_BYTES = 64 << 10
"""Up to so many gathered bytes one gather and a sum of all beat two collectives."""


class DevicePath(abc.ABC):
    """Verbs of one group on flat contiguous tensors of one device, without checks.

    Results are seen by later work on the caller's current stream, and work queued there before is waited for by the
    device. An output may be the own part of an input, and an input that of an output, as in `Comm`. Ordered sums are
    made here of moves: the tree over ranks on the device, rounded once, with the bits of the host.

    Collective over: the group, in the same order on all ranks; messages, which have two ends, may be posted by another
    thread beside a verb.

    Attributes:
        name: "mapped", "nccl", "rccl" or "pointers".
        has_sums: `library_all_reduce` and `library_reduce_scatter` exist; they are never taken for ordered sums.
        waits_on_host: a verb makes the host wait for the device, so that it keeps no lead.
        rank: position of this rank in the group.
        size: ranks of the group.
        device: of the tensors.
    """

    name: str
    has_sums = False
    waits_on_host = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    @abc.abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Equal shards in rank order. Collective over: the group."""

    @abc.abstractmethod
    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Equal parts. Collective over: the group."""

    @abc.abstractmethod
    def exchange(self, sends: Pairs, recvs: Pairs) -> None:
        """Tensors to and from other ranks, all at once; between two ranks in the order of the lists.

        Collective over: the group; also ranks that have nothing to send or receive call it.
        """

    @abc.abstractmethod
    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """From `root` to all. Collective over: the group."""

    @abc.abstractmethod
    def send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """One message."""

    @abc.abstractmethod
    def recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """One message."""

    def reaches(self, peer: int) -> bool:
        """True if messages to and from a rank go this way, the same at both ends; others are staged."""
        del peer
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Release what was opened. Collective over: the group."""

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Posted:
        """One message; the host does not wait for its receiver. `x` may change once it is done."""
        self.send(x, dst, tag)
        return Posted([], x)

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Posted:
        """One message; the host does not wait for its sender."""
        self.recv(x, src, tag)
        return Posted([], x)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str, scale: float) -> None:
        """Combine `full` of all ranks in the tree over ranks, and keep this rank's shard.

        `op` is "sum" (times `scale`), "prod", "min", "max" or bitwise; `shard` may be fp32 where `full` has 16 bits.

        Collective over: the group.
        """
        columns = full.view(self.size, shard.numel())
        width = self._width(full.dtype)
        for start in range(0, shard.numel(), width):
            cut = columns[:, start : start + width].reshape(-1)
            parts = torch.empty_like(cut)
            self.all_to_all(parts, cut)
            device_sum.combine(shard[start : start + width], parts.view(self.size, -1).unbind(), op, scale)

    def all_reduce(self, x: torch.Tensor, op: str, scale: float) -> None:
        """Combine `x` of all ranks in place, as `reduce_scatter` does. Collective over: the group."""
        if x.nbytes * self.size <= SMALL_BYTES:
            everyone = x.new_empty(self.size * x.numel())
            self.all_gather(everyone, x)
            device_sum.combine(x, everyone.view(self.size, x.numel()).unbind(), op, scale)
            return
        step = self._width(x.dtype) * self.size
        for start in range(0, x.numel(), step):
            piece = x[start : start + step]
            width = -(-piece.numel() // self.size)
            padded = piece
            if width * self.size != piece.numel():
                padded = x.new_zeros(width * self.size)
                padded[: piece.numel()].copy_(piece)
            own = padded.view(self.size, width)[self.rank]
            self.reduce_scatter(own, padded, op, scale)
            self.all_gather(padded, own)
            if padded is not piece:
                piece.copy_(padded[: piece.numel()])

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """In place, in an order of the library's own; only where it `has_sums`. Collective over: the group.

        Raises:
            CommError: it has none.
        """
        raise self._without_sums()

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Equal shards of equal dtype, likewise. Collective over: the group.

        Raises:
            CommError: it has none.
        """
        raise self._without_sums()

    def _without_sums(self) -> CommError:
        return CommError(f"the way {self.name!r} of a device's tensors has no sums of its own; use ordered ones")

    def _width(self, dtype: torch.dtype) -> int:
        """Elements of a shard so that the parts of all ranks fit the scratch."""
        return max(SCRATCH_BYTES // (self.size * dtype.itemsize), 1)
