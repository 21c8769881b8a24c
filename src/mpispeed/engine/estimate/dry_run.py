"""Dry run of optimizer steps without data: the real prefetcher on placeholder buffers, counting bytes.

Modules are taken in the order of their registration, backward in reverse; a model that runs them in another order,
several times or not at all differs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from mpispeed.mesh.collectives.work import Work
from mpispeed.sharding.prefetch import Limits, Prefetcher
from mpispeed.sharding.reducers import Backlog, limit_of

if TYPE_CHECKING:
    from mpispeed.sharding.module_units import ModuleUnits
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Table, Unit

STEPS = 3
"""Optimizer steps of a dry run: the order is recorded in the first and known from the second on."""

_SAVES_NO_WEIGHT = (nn.Embedding, nn.EmbeddingBag)
"""Their backward pass needs the indices only."""


class PaperArena:
    """Accounting of `store.arena.Arena` without memory: gives out tensors of one byte (slips) instead of buffers."""

    def __init__(self) -> None:
        self.owned_bytes = 0
        self.taken_bytes = 0
        self._free: Counter[tuple[torch.dtype, int]] = Counter()
        self._taken: dict[int, tuple[torch.dtype, int]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A slip for a buffer of `numel` elements."""
        kind = dtype, numel
        self.taken_bytes += numel * dtype.itemsize
        if self._free[kind]:
            self._free[kind] -= 1
        else:
            self.owned_bytes += numel * dtype.itemsize
        slip = torch.empty(1, dtype=torch.uint8)
        self._taken[slip.data_ptr()] = kind
        return slip

    def give(self, slip: torch.Tensor) -> None:
        """Give a slip back; its buffer may be used again."""
        dtype, numel = kind = self._taken.pop(slip.data_ptr())
        self._free[kind] += 1
        self.taken_bytes -= numel * dtype.itemsize

    def bytes_of(self, slips: Iterable[torch.Tensor]) -> int:
        """Bytes of the buffers that these taken slips stand for."""
        return sum(numel * dtype.itemsize for dtype, numel in (self._taken[slip.data_ptr()] for slip in slips))

    def lose(self, slip: torch.Tensor) -> None:
        """As `give`: no reader outlives the prefetcher here."""
        self.give(slip)


class PaperParams:
    """The interface of `ParamShards` that `Prefetcher` uses; counts the bytes of every gather."""

    def __init__(
        self,
        table: Table,
        gather: Callable[[Unit, bool], Iterable[tuple[str, tuple[str, ...], int]]],
    ) -> None:
        """Args: `gather` yields (verb, axes, bytes) of one gather; True: from a second copy."""
        self.table, self._gather = table, gather
        self.sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.fetches: Counter[tuple[int, bool]] = Counter()
        self._fresh: set[int] = set()

    def start_gather(self, channel: Any, unit: Unit, full: Any, reader: Any) -> Work:
        """Count one gather."""
        del channel, full, reader
        for verb, axes, count_bytes in self._gather(unit, unit.index in self._fresh):
            self.sent[verb, axes] += count_bytes
        self.fetches[unit.index, unit.index in self._fresh] += 1
        self._fresh.add(unit.index)
        work = Work("all_gather")
        work.finish()
        return work

    def unshard(self, unit: Unit, full: torch.Tensor) -> None:
        """No parameter is touched."""

    def reshard(self, unit: Unit) -> None:
        """No parameter is touched."""

    def updated(self) -> None:
        """Mark second copies of trained units as out of date."""
        self._fresh -= {unit.index for unit in self.table.units}


@dataclass(slots=True)
class Outcome:
    """Traffic of the last of several steps, and peaks of memory over all of them. Units: bytes.

    `fetches` counts gathers of the last step by (unit index, a fresh second copy would have been there).
    """

    fetches: dict[tuple[int, bool], int] = field(default_factory=dict)
    gathers: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    gathered_bytes: int = 0
    scratch_bytes: int = 0


Buffers = Sequence[tuple[int, torch.dtype]]
"""(elements, dtype) of buffers taken together."""


class DryRun:
    """Dry run of one rank's forward and backward passes over placeholder buffers."""

    def __init__(
        self,
        model: nn.Module,
        params: PaperParams,
        users: Sequence[ModuleUnits],
        limits: Limits,
        *,
        bucket: Callable[[Unit], Buffers],
        wire: Callable[[Unit, bool], Buffers],
        swapped: Callable[[Unit], Buffers],
        writes_behind: int,
        is_overlapped: bool,
    ) -> None:
        """Args: `bucket`: buffers for gradients; `wire`: scratch of their reduction (True: it is added to another).

        `swapped`: buffers of gradients on their way to a file, held until `writes_behind` further units are reduced.
        With `is_overlapped`, reductions run beside backward; the worst case is counted, in which none is done before
        the engine waits for it.
        """
        self._params, self._users, self._is_overlapped = params, users, is_overlapped
        self._bucket, self._wire, self._swapped = bucket, wire, swapped
        self._writes_behind = writes_behind
        self._arena, self._outcome = PaperArena(), Outcome()
        self._prefetcher = Prefetcher(
            cast("ParamShards", params), cast("Any", None), cast("Arena", self._arena), limits, wait=_is_done
        )
        self._modules = [(module, own) for module in model.modules() if (own := list(module.parameters(recurse=False)))]
        self._buckets: dict[int, list[torch.Tensor]] = {}
        self._late: list[torch.Tensor] = []  # buckets whose reductions may be pending
        self._writes: dict[int, list[torch.Tensor]] = {}  # on their way to files, by unit, oldest first
        self._backlog = Backlog(limit_of(unit.layout.padded for unit in params.table.units))
        self._missing: Counter[int] = Counter()
        self._next = 0

    def run(self, micro_steps: int, *, reduces_each: bool, fetches: bool) -> Outcome:
        """Run `STEPS` optimizer steps of `micro_steps` micro-batches.

        Args:
            micro_steps: forward and backward passes for each step.
            reduces_each: gradients are reduced in every micro-step, not only in the last.
            fetches: some parameters are sharded.
        """
        for _ in range(STEPS):
            self._params.sent.clear()
            self._params.fetches.clear()
            for micro in range(micro_steps):
                if fetches:
                    self._forward()
                self._backward(
                    is_added=reduces_each and micro > 0,
                    reduces=reduces_each or micro == micro_steps - 1,
                    fetches=fetches,
                )
            self._backlog.clear()
            while self._writes:
                self._take_back(next(iter(self._writes)))
            if fetches:
                self._prefetcher.reshard_all()
            self._params.updated()
        self._outcome.gathers, self._outcome.fetches = dict(self._params.sent), dict(self._params.fetches)
        self._outcome.scratch_bytes = self._arena.owned_bytes
        return self._outcome

    # -- forward -----------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        self._prefetcher.begin_pass(True)
        running: list[ModuleUnits] = []
        for user in self._users:
            while running and running[-1].name and not user.name.startswith(f"{running[-1].name}."):
                self._prefetcher.unhold(running.pop().units, reshards=True)
            if user.units:
                self._use(user.units, is_backward=False)
                self._prefetcher.hold(user.units)
            running.append(user)
        for user in reversed(running):
            self._prefetcher.unhold(user.units, reshards=True)

    def _use(self, units: Sequence[Unit], *, is_backward: bool) -> None:
        self._prefetcher.unshard(units, is_backward=is_backward, reader=lambda: "a module")
        others = (*self._buckets.values(), self._late, *self._writes.values())
        buckets = sum(self._arena.bytes_of(slips) for slips in others)
        self._outcome.gathered_bytes = max(self._outcome.gathered_bytes, self._arena.taken_bytes - buckets)

    # -- backward ----------------------------------------------------------------------------------------------

    def _backward(self, *, is_added: bool, reduces: bool, fetches: bool) -> None:
        table = self._params.table
        left = Counter(id(param) for _, params in self._modules for param in params)
        self._missing = Counter({unit.index: len(unit.layout.entries) for unit in table.units})
        self._next = len(table.units) - 1
        for module, params in reversed(self._modules):
            places = [place for param in params if (place := table.locate(param)) is not None]
            units = {place.unit.index: place.unit for place in places if not place.unit.states.param.is_replicated}
            if fetches and units and not isinstance(module, _SAVES_NO_WEIGHT):
                self._use(tuple(units.values()), is_backward=True)
            for param in params:
                left[id(param)] -= 1
                place = table.find(param)
                if place is not None and not left[id(param)]:
                    self._land(place.unit, is_added=is_added, reduces=reduces)
                    if fetches and not self._missing[place.unit.index]:
                        self._prefetcher.reshard_unused((place.unit.index,))
        if fetches:
            self._prefetcher.reshard_idle()

    def _settle(self, bucket: list[torch.Tensor]) -> None:
        """Free a bucket whose reduction the engine has waited for."""
        for slip in bucket:
            self._arena.give(slip)
        given = {id(slip) for slip in bucket}
        self._late = [slip for slip in self._late if id(slip) not in given]

    def _land(self, unit: Unit, *, is_added: bool, reduces: bool) -> None:
        if not reduces:
            self._missing[unit.index] -= 1
            return
        if unit.index not in self._buckets:
            self._buckets[unit.index] = [self._arena.take(*kind) for kind in self._bucket(unit)]
        self._missing[unit.index] -= 1
        units = self._params.table.units
        while self._next >= 0 and not self._missing[self._next]:
            self._launch(units[self._next], is_added=is_added)
            self._next -= 1

    def _launch(self, unit: Unit, *, is_added: bool) -> None:
        self._take_back(unit.index)
        bucket, swapped = self._buckets.pop(unit.index), [self._arena.take(*kind) for kind in self._swapped(unit)]
        scratch = [self._arena.take(*kind) for kind in self._wire(unit, is_added)]
        for slip in scratch:
            self._arena.give(slip)
        if swapped:
            self._writes[unit.index] = swapped
        while len(self._writes) > self._writes_behind:
            self._take_back(next(iter(self._writes)))
        if self._is_overlapped:
            self._late += bucket
            self._backlog.add(unit.layout.padded, functools.partial(self._settle, bucket))
            return
        for slip in bucket:
            self._arena.give(slip)

    def _take_back(self, index: int) -> None:
        """Free the buffers of a unit's gradients that are in their file."""
        for slip in self._writes.pop(index, ()):
            self._arena.give(slip)


def _is_done(work: Work, what: Callable[[], str]) -> None:
    del what
    work.wait()
