"""Verbs on torch tensors, as methods of a group; `verbs` has their checks and implementations.

MPI, one rank alone and simulated ranks implement the primitives of `transport.Transport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ParamSpec

import torch

from mpispeed.mesh.collectives import verbs
from mpispeed.mesh.collectives.meetings import Meetings
from mpispeed.mesh.collectives.verbs import Message, Verb
from mpispeed.mesh.collectives.work import Work

P = ParamSpec("P")


class Comm(Meetings):
    """A group of ranks and the verbs over it.

    Verbs are collective over this group unless their docstring says otherwise, take contiguous tensors of
    any dtype and shape, and never allocate a result. Tensors of a device go through `device_collectives`: on all ranks
    of a collective, or on none.
    """

    # -- verbs -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `x` of all ranks in place; `scale` multiplies the sum before it is rounded.

        Collective over: this group.
        """
        verbs.ALL_REDUCE.carry_out(self, x, op, scale)

    def reduce(self, x: torch.Tensor, root: int = 0, op: str = "sum") -> None:
        """Combine `x` of all ranks into `x` of `root`; other ranks keep theirs.

        Collective over: this group.
        """
        verbs.REDUCE.carry_out(self, x, root, op)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> None:
        """Copy `x` of `root` to all ranks.

        Collective over: this group.
        """
        verbs.BROADCAST.carry_out(self, x, root)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Collect the shards of all ranks in rank order; `shard` may be this rank's own slice of `out`.

        Collective over: this group.
        Shapes: out has `size` times the elements of shard.
        """
        verbs.ALL_GATHER.carry_out(self, out, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> None:
        """Combine `full` of all ranks and keep this rank's equal cut in `shard`.

        `shard` may be fp32 where `full` is a 16-bit float: then the sum is not rounded. It may be this
        rank's own slice of `full`; other contents of `full` are left alone.

        Collective over: this group.
        Shapes: full has `size` times the elements of shard.
        """
        verbs.REDUCE_SCATTER.carry_out(self, shard, full, op, scale)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Send the j-th part of `x` to rank j; `out` receives the parts in rank order.

        Collective over: this group; either all ranks give counts or none does.
        Units: counts are elements of the flat tensors.
        """
        verbs.ALL_TO_ALL.carry_out(self, out, x, out_counts, counts)

    def gather(self, out: torch.Tensor, shard: torch.Tensor, root: int = 0) -> None:
        """Collect the shards of all ranks in rank order in `out` of `root`, of which `shard` may be the own slice.

        Collective over: this group.
        Shapes: out has `size` times the elements of shard on `root`; on other ranks it is not used and may be empty.
        """
        verbs.GATHER.carry_out(self, out, shard, root)

    def scatter(self, shard: torch.Tensor, full: torch.Tensor, root: int = 0) -> None:
        """Give each rank its equal cut of `full` of `root`; `shard` may be the own slice of `full`.

        Collective over: this group.
        Shapes: full has `size` times the elements of shard on `root`; on other ranks it is not used and may be empty.
        """
        verbs.SCATTER.carry_out(self, shard, full, root)

    def send(self, x: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `x` to rank `dst` of this group, which receives with the same tag and size."""
        verbs.SEND.carry_out(self, x, dst, tag)

    def recv(self, x: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `x` with the message that rank `src` of this group sends with the same tag and size."""
        verbs.RECV.carry_out(self, x, src, tag)

    # -- verbs started now and waited for later --------------------------------------------------------------

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum", *, scale: float = 1.0) -> Work:
        """Start `all_reduce`. Collective over: the group."""
        return self._start(verbs.ALL_REDUCE, x, op, scale)

    def start_all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start `all_gather`. Collective over: the group."""
        return self._start(verbs.ALL_GATHER, out, shard)

    def start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, op: str = "sum", *, scale: float = 1.0
    ) -> Work:
        """Start `reduce_scatter`. Collective over: the group."""
        return self._start(verbs.REDUCE_SCATTER, shard, full, op, scale)

    def start_all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Start `all_to_all`. Collective over: the group."""
        return self._start(verbs.ALL_TO_ALL, out, x, out_counts, counts)

    def start_broadcast(self, x: torch.Tensor, root: int = 0) -> Work:
        """Start `broadcast`. Collective over: the group."""
        return self._start(verbs.BROADCAST, x, root)

    def start_send(self, x: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Post `send`; not collective."""
        return self._post(verbs.SEND, x, dst, tag)

    def start_recv(self, x: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Post `recv`; not collective."""
        return self._post(verbs.RECV, x, src, tag)

    # -- how -------------------------------------------------------------------------------------------------

    def _start(self, verb: Verb[P], *args: P.args, **kwargs: P.kwargs) -> Work:
        verb.check(self.started, f"start_{verb.name}", args)
        label = "" if verb.label is None else verb.label(*args, **kwargs)
        return self.start(lambda comm: verb.carry_out(comm, *args, **kwargs), verb.name, args[: verb.tensors], label)

    def _post(self, verb: Message[P], *args: P.args, **kwargs: P.kwargs) -> Work:
        posted, row = verb.post(self.started, *args, **kwargs)
        return self.await_posted(verb.name, args[0], posted, row)
