"""Sums of gradients in the order of slots: their bits do not depend on the ranks that computed them.

A slot is one micro-batch of the global batch, and its gradient one leaf of the tree of `native.reduce.tree_sum`. It is
rounded to the dtype of messages once; sums stay in fp32 (fp64 in fp64) and in that tree wherever they are made, and the
root is multiplied once, so nothing is rounded or divided on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.native import device_sum
from mpispeed.native.reduce import tree_sum
from mpispeed.sharding.leaf_tree import Forest, LeafTree, Node, Subtree
from mpispeed.sharding.reducers import Averaging, PlainReducer, SumGradients
from mpispeed.store.placement import Placement, Tier
from mpispeed.store.transfers import receives

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh, Topology
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.reducers import Reduction
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Unit


class Leaves:
    """The leaves of the ranks of a group, in the micro-steps of an update. Pure.

    Attributes:
        tree: over all of them.
        of: leaves of each rank, by micro-step.
    """

    def __init__(self, of: Sequence[Sequence[int]]) -> None:
        """Args: `of` has as many leaves of each rank."""
        self.of = of
        self.tree = LeafTree(sum(map(len, of)))
        self._turns: dict[int, tuple[Subtree, ...]] = {}

    @property
    def micro_steps(self) -> int:
        """Micro-steps of an update."""
        return len(self.of[0])

    def turn(self, micro_step: int) -> tuple[Subtree, ...]:
        """The subtrees that all ranks complete in a micro-step."""
        found = self._turns.get(micro_step)
        if found is None:
            found = self._turns[micro_step] = self.tree.cover(own[micro_step] for own in self.of)
        return found

    def is_one_sum(self, micro_step: int) -> bool:
        """True if a sum in the order of the ranks is that subtree: there is one, and its leaves are in their order."""
        turn = self.turn(micro_step)
        return len(turn) == 1 and turn[0].leaves == tuple(own[micro_step] for own in self.of)

    @cached_property
    def owned(self) -> tuple[tuple[Subtree, ...], ...]:
        """The subtrees that each rank completes by itself in an update."""
        return tuple(self.tree.cover(own) for own in self.of)

    @cached_property
    def are_in_order(self) -> bool:
        """True if each rank completes one subtree, and the sum of them in the order of the ranks is the tree."""
        if len(self.of) == 1:
            return True
        each = self.micro_steps
        return not each & (each - 1) and [*chain(*self.of)] == [*range(self.tree.leaves)]


@dataclass(slots=True)
class _Growing:
    """The sums of a unit since the last update.

    Attributes:
        forest: sums of this rank's range where gradients are cut, else of its own slots.
        taken: micro-steps that it has.
        home: the accumulator, which may be one of the sums.
        is_home_free: it is none.
    """

    forest: Forest[torch.Tensor]
    taken: int = 0
    home: torch.Tensor | None = None
    is_home_free: bool = False


class SlotSums(SumGradients):
    """The `UnitExchange` of `reduction` "invariant": every bucket is the gradient of one slot.

    Where accumulators are cut over ranks, each bucket goes to the owners of its ranges, which keep a forest of sums;
    else each rank keeps a forest of its own slots, and sends it to owners at the end. Ranks whose slots complete one
    subtree send one sum; a rank with several subtrees sends each of them, and nothing for those that it has not.
    Slots that never came are zeros.
    """

    keeps_buckets = True

    def __init__(
        self,
        shards: GradShards,
        channel: Mesh,
        scale: float,
        leaves_of: Callable[[tuple[str, ...]], Leaves],
        *,
        passes: int | None = None,
    ) -> None:
        """Prepare sums.

        Args:
            shards: the accumulators.
            channel: the ranks.
            scale: factor of the roots.
            leaves_of: the leaves of the ranks along the axes over which the gradients of a unit are partial sums.
            passes: backward passes that an update can have; None: others count them.
        """
        super().__init__(shards, channel, Averaging(1.0, scale), reducer=PlainReducer())
        self._scale, self._leaves_of, self._most = scale, leaves_of, passes
        self._units: dict[int, _Growing] = {}
        self._kinds: dict[tuple[str, ...], Leaves] = {}
        self._orders: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self._passes = 0

    def begin_backward(self, *, is_again: bool) -> None:
        """As in `UnitExchange`.

        Raises:
            UsageError: all slots of the update have had their pass.
        """
        if self._most is not None and self._passes >= self._most:
            msg = (
                f'reduction "invariant": an update has {self._most} backward passes of this rank, one for each '
                "micro-batch, and this is one more; call engine.backward once for each micro-batch, with the sum of "
                'its losses, and engine.step() after it, or use reduction "ordered"'
            )
            raise UsageError(msg)
        self._passes += 1

    def clear(self) -> None:
        """As in `UnitExchange`."""
        super().clear()
        self._passes = 0
        for growing in self._units.values():
            for value in growing.forest.clear():
                self._give(growing, value)
        self._units.clear()

    def take(self, unit: Unit, reduction: Reduction, *, squares: bool) -> None:
        """Take the gradient of a slot; the last one completes the sum.

        On the channel's progress thread when overlapped, so it touches only this unit's buffers.

        Collective over: the axes of `each_sum` of the unit's states; where accumulators are not cut, only the last.
        """
        growing = self._units.get(unit.index)
        if growing is None:
            growing = self._units[unit.index] = self._begin(unit)
        if reduction.bucket is not None:
            self._add(unit, growing, reduction.bucket)
        if not reduction.completes:
            return
        while growing.taken < self._leaves(unit).micro_steps:
            self._add(unit, growing, self._shards.arena.take(unit.layout.padded, unit.states.wire).zero_())
        target = self._shards.begin(unit, reads=False)
        if unit.states.grad.is_replicated:
            self._meet(unit, growing, target)
        else:
            root = growing.forest.pop(self._leaves(unit).tree.root)
            self._put(target, root)
            self._give(growing, root)
        self._shards.end(unit, target, squares=squares)
        del self._units[unit.index]

    @property
    def held_bytes(self) -> int:
        """Bytes of sums that are not complete, beside accumulators."""
        return sum(
            value.nbytes
            for growing in self._units.values()
            for _, value in growing.forest.items()
            if value is not growing.home
        )

    # -- slots -------------------------------------------------------------------------------------------------------

    def _leaves(self, unit: Unit) -> Leaves:
        axes = unit.states.partial
        found = self._kinds.get(axes)
        if found is None:
            found = self._kinds[axes] = self._leaves_of(axes)
        return found

    def _begin(self, unit: Unit) -> _Growing:
        growing = _Growing(Forest(self._leaves(unit).tree, lambda left, right: self._join(growing, left, right)))
        if unit.states.grad.is_replicated:
            whole = self._shards.whole(unit)
            if whole.dtype == _wide(unit.states.wire):
                growing.home, growing.is_home_free = whole, True
        return growing

    def _add(self, unit: Unit, growing: _Growing, bucket: torch.Tensor) -> None:
        """Take the gradients of this rank's slot, or of all ranks' slots of a micro-step."""
        leaves, comm = self._leaves(unit), self._channel[unit.states.each_sum]
        micro_step, growing.taken = growing.taken, growing.taken + 1
        if unit.states.grad.is_replicated:
            growing.forest.add(Node(0, leaves.of[comm.rank][micro_step]), bucket)
            return
        with _Borrowed(self._shards.arena) as borrowed:
            ordered = self._by_rank(unit, bucket, borrowed)
            if leaves.is_one_sum(micro_step):
                total = self._new(unit)
                comm.reduce_scatter(total, ordered)
                growing.forest.add(leaves.turn(micro_step)[0].node, total)
            else:
                parts = borrowed.take(ordered.numel(), ordered.dtype, like=ordered)
                comm.all_to_all(parts, ordered)
                columns = parts.view(comm.size, -1).unbind()
                rank_of = {own[micro_step]: rank for rank, own in enumerate(leaves.of)}
                for subtree in leaves.turn(micro_step):
                    total = self._new(unit)
                    self._put(total, *(columns[rank_of[leaf]] for leaf in subtree.leaves), scale=1.0)
                    growing.forest.add(subtree.node, total)
        self._shards.arena.give(bucket)

    def _new(self, unit: Unit) -> torch.Tensor:
        """A buffer for a sum of this rank's range, where its accumulator is."""
        span, wide = self._shards.target_span(unit), _wide(unit.states.wire)
        is_away = unit.states.grad.tier is not Tier.DEVICE
        return self._shards.arena.take(span.numel, wide, on_host=is_away, pin=is_away and self._shards.pins)

    def _join(self, growing: _Growing, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The sum of both, in the wide dtype."""
        wide = _wide(left.dtype if left.dtype.itemsize > right.dtype.itemsize else right.dtype)
        if left.dtype != right.dtype:
            out, narrow = (left, right) if left.dtype == wide else (right, left)
            out.add_(narrow)  # widened first
            self._give(growing, narrow)
            return out
        out = left
        if growing.is_home_free and growing.home is not None:
            out, growing.is_home_free = growing.home, False
        elif right is growing.home:
            out = right
        elif left.dtype != wide:
            out = self._shards.arena.take(left.numel(), wide, on_host=left.device.type == "cpu")
        self._join_all(out, (left, right))
        for value in (left, right):
            if value is not out:
                self._give(growing, value)
        return out

    def _give(self, growing: _Growing, value: torch.Tensor) -> None:
        if value is growing.home:
            growing.is_home_free = True
        else:
            self._shards.arena.give(value)

    # -- the end of an update, where each rank has sums of its own slots ---------------------------------------------

    def _meet(self, unit: Unit, growing: _Growing, target: torch.Tensor) -> None:
        """Finish the tree of each range on its owner, and leave what this rank needs of it in `target`."""
        leaves, comm, forest = self._leaves(unit), self._channel[unit.states.each_sum], growing.forest
        is_whole = unit.states.master.is_replicated and comm.size > 1
        own = target.view(comm.size, -1)[comm.rank] if is_whole else target
        with _Borrowed(self._shards.arena) as borrowed:
            if comm.size == 1:
                self._put(own, forest.items()[0][1])
            elif leaves.are_in_order:
                self._scatter(comm, own, self._by_rank(unit, forest.items()[0][1], borrowed), borrowed)
            else:
                self._put(own, self._root(unit, leaves, comm, [value for _, value in forest.items()], borrowed))
        for value in forest.clear():
            self._give(growing, value)
        if is_whole:
            comm.all_gather(target, own)

    def _scatter(self, comm: Comm, own: torch.Tensor, ordered: torch.Tensor, borrowed: _Borrowed) -> None:
        """The sum over ranks in their order."""
        if receives(own.dtype, ordered.dtype):
            comm.reduce_scatter(own, ordered, scale=self._scale)
            return
        total = borrowed.take(own.numel(), _wide(ordered.dtype), like=own)
        comm.reduce_scatter(total, ordered, scale=self._scale)
        own.copy_(total)

    def _root(
        self, unit: Unit, leaves: Leaves, comm: Comm, sums: list[torch.Tensor], borrowed: _Borrowed
    ) -> torch.Tensor:
        """The sum of this rank's range, of the subtrees of all ranks; they travel in rounds, one of each rank."""
        piece, wide = unit.layout.padded // comm.size, _wide(unit.states.wire)

        def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            self._join_all(left, (left, right))
            return left

        forest: Forest[torch.Tensor] = Forest(leaves.tree, join)
        for number in range(max(map(len, leaves.owned))):
            senders = [rank for rank, owned in enumerate(leaves.owned) if number < len(owned)]
            nodes = [leaves.owned[rank][number] for rank in senders]
            # Slots alone have the dtype of messages; all ranks know which.
            dtype = unit.states.wire if all(len(subtree.leaves) == 1 for subtree in nodes) else wide
            own = sums[number] if number < len(sums) else torch.empty(0, dtype=dtype, device=sums[0].device)
            if own.dtype != dtype:
                own = borrowed.take(own.numel(), wide, like=own).copy_(own)
            ordered = self._by_rank(unit, own, borrowed) if own.numel() else own
            parts = borrowed.take(piece * len(senders), dtype, like=own)
            if len(senders) == comm.size:
                comm.all_to_all(parts, ordered)
            else:
                taking = set(senders)
                counts = [piece if rank in taking else 0 for rank in range(comm.size)]
                comm.all_to_all(parts, ordered, counts, [piece if own.numel() else 0] * comm.size)
            if dtype != wide:
                parts = borrowed.take(parts.numel(), wide, like=own).copy_(parts)
            for subtree, part in zip(nodes, parts.view(len(senders), -1).unbind(), strict=True):
                forest.add(subtree.node, part)
        return forest.pop(leaves.tree.root)

    # -- ranges and their owners -------------------------------------------------------------------------------------

    def _by_rank(self, unit: Unit, full: torch.Tensor, borrowed: _Borrowed) -> torch.Tensor:
        """`full` with the ranges of its owners in the order of the ranks: itself, or a copy."""
        axes, placement = unit.states.each_sum, unit.states.master
        if placement.is_replicated:
            return full
        key = (axes, placement.axes)
        if key not in self._orders:
            self._orders[key] = range_order(self._channel.topology, axes, placement)
        order = self._orders[key]
        if order is None:
            return full
        copy, rows = borrowed.take(full.numel(), full.dtype, like=full), full.view(len(order), -1)
        for out, row in zip(copy.view(len(order), -1), order, strict=True):
            out.copy_(rows[row])
        return copy

    def _put(self, target: torch.Tensor, *parts: torch.Tensor, scale: float | None = None) -> None:
        """Write the sum of `parts` in their order, times the scale of roots, into `target`, rounded once."""
        factor = self._scale if scale is None else scale
        if parts[0].device == target.device and receives(target.dtype, parts[0].dtype):
            self._join_all(target, parts, factor)
            return
        with _Borrowed(self._shards.arena) as borrowed:
            total = borrowed.take(target.numel(), _wide(parts[0].dtype), like=parts[0])
            self._join_all(total, parts, factor)
            target.copy_(total)

    def _join_all(self, out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        """The tree of `parts`, which have one dtype, times `scale`; nothing happens on meta."""
        if out.device.type == "meta":
            return
        if out.device.type == "cpu":
            tree_sum(out, parts, scale=scale, threads=self._channel["data"].group.threads)
        else:
            device_sum.combine(out, parts, "sum", scale)


class _Borrowed:
    """Buffers of an arena that are given back together."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._buffers: list[torch.Tensor] = []

    def __enter__(self) -> _Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            self._arena.give(buffer)

    def take(self, numel: int, dtype: torch.dtype, *, like: torch.Tensor) -> torch.Tensor:
        """A buffer in the memory of `like`."""
        buffer = self._arena.take(numel, dtype, on_host=like.device.type == "cpu")
        self._buffers.append(buffer)
        return buffer


def range_order(topology: Topology, axes: Sequence[str], placement: Placement) -> tuple[int, ...] | None:
    """The numbers of the equal ranges that the ranks along `axes` own under `placement`; None: those of the ranks."""
    peers = topology.peers(0, tuple(axes))
    order = []
    for rank in peers:
        number = 0
        for axis in placement.axes:
            number = number * topology.group_size(axis) + topology.index(rank, axis)
        order.append(number)
    return None if order == [*range(len(order))] else tuple(order)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
