"""Unsharding of units on use, ahead of time where the order of uses is known, and resharding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.sharding.use_order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from mpispeed.mesh.collectives.work import Wait, Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.divergent_fetch import DivergentFetch
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Unit

LOOK_AHEAD_USES = 16
"""How far prefetch looks along the expected order; a bound on the time one look takes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a `Prefetcher`. Units: elements.

    Attributes:
        ahead: fetched before they are needed.
        live: whole at once, beside what one module needs; None: what the model needs (`by_need`).
        reuse: a unit stays if fewer elements of others are used before it is used again; None: as `live` allows.
        is_firm: `live` was asked for: more is an error, and prefetch stops there. Else a module gets what it needs,
            and prefetch makes room by letting go of what is used later than what it fetches.
    """

    ahead: int = 5 * 10**7
    live: int | None = None
    reuse: int | None = None
    is_firm: bool = True

    def by_need(self, elements: int) -> Limits:
        """The same, but `live` is `elements` where nothing was asked for."""
        return self if self.live is not None else replace(self, live=elements, is_firm=False)


@dataclass(slots=True)
class Tally:
    """Counts of fetches since the start."""

    fetches: int = 0
    ahead: int = 0  # of these, started before they were needed
    unused: int = 0  # of these, let go without having been used
    served: int = 0  # gathers for other ranks only
    kept_elsewhere: int = 0  # buffers that somebody still looked at when they were let go
    live_elements: int = 0
    peak_elements: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0

    def appear(self, elements: int, count: int) -> None:
        """A buffer of `count` bytes is there from now on."""
        self.fetches += 1
        self.live_elements += elements
        self.peak_elements = max(self.peak_elements, self.live_elements)
        self.live_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def vanish(self, elements: int, count: int) -> None:
        """A buffer of `count` bytes is there no more."""
        self.live_elements -= elements
        self.live_bytes -= count


class Prefetcher:
    """Decides when sharded units are unsharded. Equal calls on all ranks start equal gathers in equal order.

    Attributes:
        absent: units of layers that the next passes leave out; the same on all ranks.

    Collective over: the axes over which parameters are sharded at rest, for `use` and everything that calls it.
    """

    def __init__(
        self,
        shards: ParamShards,
        channel: Mesh,
        arena: Arena,
        limits: Limits,
        *,
        wait: Wait,
        rounds: DivergentFetch | None = None,
    ) -> None:
        """Start with nothing unsharded.

        Args:
            shards: the parameters at rest.
            channel: carries the gathers.
            arena: gives the full buffers.
            limits: budgets; without `live` the largest two units count as what the model needs.
            wait: waits for a started gather; its second argument is the reason, for messages.
            rounds: agreement on the union of wanted units before each fetch; None: all ranks do the same.
        """
        self.rounds = rounds
        self.absent: frozenset[int] = frozenset()
        self.shards, self.tally = shards, Tally()
        self._channel, self._arena, self._wait = channel, arena, wait
        self._units = shards.table.all_units
        self.order = Order([unit.layout.padded for unit in self._units])
        self._full: dict[int, torch.Tensor] = {}
        self._owners: dict[int, int] = {}  # storage of a buffer -> index of the unit in it
        self._works: dict[int, Work] = {}
        self._users: dict[int, int] = {}  # storage use counts of buffers that nobody looks at
        self._holds: Counter[int] = Counter()
        self._ahead: set[int] = set()
        self._recent: list[int] = []
        self._bound: dict[int, set[int]] = {}
        sizes = sorted(unit.layout.padded for unit in self._units if not unit.states.param.is_replicated)
        self._largest = max(sizes, default=0)
        self.limits = limits.by_need(sum(sizes[-2:]))
        self._live = self.limits.live or 0
        arena.rests = True

    # -- use ---------------------------------------------------------------------------------------------------

    def begin_pass(self, kind: Hashable) -> None:
        """Begin a pass of the outermost module; passes of one kind are expected to be alike."""
        self.order.begin(kind, self.absent)
        self.reshard_idle()

    def unshard(self, units: Sequence[Unit], *, is_backward: bool, reader: Callable[[], str]) -> None:
        """Return when all of `units` are unsharded and their parameters readable; start what comes next.

        Raises:
            StoreError: more has to be unsharded at once than the limit allows.
        """
        for unit in units:
            self.order.note(unit.index, is_backward=is_backward)
        needed = {unit.index for unit in units}
        near = needed.union(*(self._bound.get(index, ()) for index in needed)) if is_backward else needed
        self._start_missing(units, near, reader)
        if self.rounds is None:
            self._look_ahead(near, reader)
        for unit in units:
            self._arrive(unit, reader)
        if is_backward:
            recent, self._recent = self._recent, []
            self._recent.extend(index for index in recent if index in near and index not in needed)
            self.reshard_unused(index for index in recent if index not in near)
        self._recent.extend(needed)

    def bind(self, units: Sequence[Unit]) -> None:
        """Note that one module uses `units` in turns: the use of one in backward does not end that of the others."""
        indices = {unit.index for unit in units}
        for index in indices if len(indices) > 1 else ():
            self._bound.setdefault(index, set()).update(indices)

    def open(self, units: Sequence[Unit], reader: Callable[[], str] = lambda: "GatheredParameters") -> None:
        """Hold `units` unsharded for a caller that is no part of a pass."""
        self._start_missing(units, {unit.index for unit in units}, reader, is_strict=False)
        for unit in units:
            self._arrive(unit, reader)
        self.hold(units)

    def close(self, units: Sequence[Unit]) -> None:
        """End of `open`."""
        self.unhold(units, reshards=True)

    def hold(self, units: Iterable[Unit]) -> None:
        """Keep `units` whole until `unhold`."""
        self._holds.update(unit.index for unit in units)

    def unhold(self, units: Iterable[Unit], *, reshards: bool) -> None:
        """Release `units`; those that nobody else holds and nobody will need soon are resharded if `reshards`."""
        indices = [unit.index for unit in units]
        self._holds.subtract(indices)
        if reshards:
            self.reshard_unused(indices)

    def reshard_unused(self, indices: Iterable[int]) -> None:
        """Reshard units that are not held and not expected within the reuse limit."""
        for index in list(indices):
            if index in self._full and not self._holds[index] and index not in self._ahead and not self._is_soon(index):
                self._release(index)

    def reshard_idle(self) -> None:
        """Reshard everything that is not held and not expected soon, also units prefetched in vain."""
        self._recent.clear()
        for index in sorted(self._ahead):
            if self.order.distance(index) is None:
                self._release(index)
        self.reshard_unused(sorted(self._full))

    def reshard_all(self) -> None:
        """Reshard everything: parameters are about to change, or the model is given back.

        Raises:
            StoreError: a unit is held; parameters cannot change inside of a module's forward.
        """
        held = [self._units[index].name for index, count in self._holds.items() if count > 0]
        if held:
            msg = (
                f"parameters of {', '.join(sorted(held)[:5])} are in use: step, load and empty_partition_cache belong "
                "outside of forward and of GatheredParameters"
            )
            raise StoreError(msg)
        for index in sorted(self._full):
            self._release(index)
        self._recent.clear()

    def abandon(self) -> None:
        """Drop everything for good, even if held and even if its gathers have failed."""
        self._holds.clear()
        for work in self._works.values():
            work.settle()
        for index in sorted(self._full):
            self.shards.reshard(self._units[index])
        self._works.clear()
        self._full.clear()
        self._owners.clear()
        self._ahead.clear()
        self._recent.clear()
        self.tally.live_elements = self.tally.live_bytes = 0

    def owner(self, tensor: torch.Tensor) -> int | None:
        """Index of the unit whose buffer `tensor` is a view of."""
        return self._owners.get(_storage(tensor))

    def full(self, unit: Unit) -> torch.Tensor | None:
        """The unit's full buffer while it is there. Shapes: [padded]."""
        return None if unit.index in self._works else self._full.get(unit.index)

    def settled(self, unit: Unit) -> torch.Tensor | None:
        """The unit's full buffer, once a pending gather has arrived; None if nobody has fetched it."""
        self._arrive(unit, lambda: "a change of its parameters")
        return self._full.get(unit.index)

    def reshard(self, units: Iterable[Unit]) -> None:
        """Reshard `units` unless somebody holds them: the next use gathers the shards again."""
        for unit in units:
            if unit.index in self._full and not self._holds[unit.index]:
                self._release(unit.index)

    def meet(self, reader: Callable[[], str]) -> None:
        """Where ranks may diverge, take part in fetches of the others until all have come here."""
        if self.rounds is not None:
            self.rounds.finish(self._serve, reader)

    def _start_missing(
        self, units: Sequence[Unit], near: set[int], reader: Callable[[], str], *, is_strict: bool = True
    ) -> None:
        """Start gathers of the missing ones of `units`; room is made without resharding `near`."""
        wanted = {unit.index: unit for unit in units if unit.index not in self._full}
        if not wanted:
            return
        self._make_room(sum(unit.layout.padded for unit in wanted.values()), near, reader, is_strict=is_strict)
        for index in sorted(wanted) if self.rounds is None else self.rounds.ask(sorted(wanted), reader):
            if index in wanted:
                self._start(wanted[index], reader)
            else:
                self._serve(index)

    def _serve(self, index: int) -> None:
        """Take part in a gather whose result only other ranks need."""
        unit = self._units[index]
        scratch = self._arena.take(unit.layout.padded, unit.states.compute)
        work = self.shards.start_gather(self._channel, unit, scratch, lambda: "other ranks")
        self._wait(work, lambda: f"parameters {unit.name!r}, which another rank needs")
        self._arena.give(scratch)
        self.tally.served += 1

    # -- one unit --------------------------------------------------------------------------------------------

    def _start(self, unit: Unit, reader: Callable[[], str]) -> None:
        full = self._arena.take(unit.layout.padded, unit.states.compute)
        self._full[unit.index] = full
        self._users[unit.index] = _looking_at(full)
        self._owners[_storage(full)] = unit.index
        self.tally.appear(unit.layout.padded, full.nbytes)
        self._works[unit.index] = self.shards.start_gather(self._channel, unit, full, reader)

    def _arrive(self, unit: Unit, reader: Callable[[], str]) -> None:
        self._ahead.discard(unit.index)
        work = self._works.pop(unit.index, None)
        if work is not None:
            self._wait(work, lambda: f"parameters {unit.name!r} for {reader()}")
            self.shards.unshard(unit, self._full[unit.index])

    def _release(self, index: int) -> None:
        unit = self._units[index]
        work = self._works.pop(index, None)
        if work is not None:
            self._wait(work, lambda: f"parameters {unit.name!r}, which are not needed any more")
        else:
            self.shards.reshard(unit)
        if index in self._ahead:
            self._ahead.discard(index)
            self.tally.unused += 1
        full = self._full.pop(index)
        self._owners.pop(_storage(full))
        self.tally.vanish(unit.layout.padded, full.nbytes)
        # A view that somebody kept stays valid: its memory is not used again.
        if _looking_at(full) > self._users.pop(index):
            self.tally.kept_elsewhere += 1
            self._arena.lose(full)
        else:
            self._arena.give(full)
        if not self._full and next(self.order.upcoming(1), None) is None:
            self._arena.rest()  # no more parameters in this pass, as far as is known

    # -- policy ------------------------------------------------------------------------------------------------

    def _is_soon(self, index: int) -> bool:
        if self.order.is_unfinished(index):
            return True
        if self.limits.reuse is None and not self.limits.is_firm:
            return self.order.is_within(index, self._live)
        distance = self.order.distance(index)
        return distance is not None and (self.limits.reuse is None or distance < self.limits.reuse)

    def _make_room(self, elements: int, needed: set[int], reader: Callable[[], str], *, is_strict: bool = True) -> None:
        """Reshard units that are needed last until `elements` more fit under the limit."""
        limit = self._live
        if self.tally.live_elements + elements <= limit:
            return
        for index in self._latest_first(needed):
            self._release(index)
            if self.tally.live_elements + elements <= limit:
                return
        present = sum(self._units[index].layout.padded for index in needed if index in self._full)
        most = limit + max(self._largest, elements + present)
        if is_strict and self.limits.is_firm and self.tally.live_elements + elements > most:
            held = ", ".join(self._units[i].name for i in sorted(self._full))
            raise _too_much(reader(), elements, self.tally.live_elements, held, limit, most)

    def _latest_first(self, needed: set[int]) -> list[int]:
        """Units that may be resharded: first those that nobody is expected to use, then those that are used last."""
        far = {i: self.order.distance(i) for i in self._full if not self._holds[i] and i not in needed}
        return sorted(far, key=lambda i: (far[i] is None, far[i] or 0, i), reverse=True)

    def _has_room(self, unit: Unit, needed: set[int]) -> bool:
        """True if `unit`, which is expected, fits; without a firm limit units used later are resharded for it."""
        missing = self.tally.live_elements + unit.layout.padded - self._live
        if missing <= 0 or self.limits.is_firm:
            return missing <= 0
        own, chosen = self.order.distance(unit.index) or 0, []
        for index in self._latest_first(needed):
            distance = self.order.distance(index)
            if missing <= 0 or (distance is not None and distance <= own):
                break
            chosen.append(index)
            missing -= self._units[index].layout.padded
        for index in chosen if missing <= 0 else ():
            self._release(index)
        return missing <= 0

    def _look_ahead(self, needed: set[int], reader: Callable[[], str]) -> None:
        """Start gathers of the units expected next, within both budgets; `needed` are not resharded for them."""
        ahead = sum(self._units[index].layout.padded for index in self._ahead if index not in needed)
        own = sum(self._units[index].layout.padded for index in needed)
        enough = self.limits.ahead if self.limits.is_firm else min(self.limits.ahead, own)
        if ahead >= enough or not self.order.is_known:
            return
        for index in self.order.upcoming(LOOK_AHEAD_USES):
            if index in self._full:
                continue
            unit = self._units[index]
            size = unit.layout.padded
            if ahead >= enough or not self._has_room(unit, needed):
                return
            self._ahead.add(index)
            self._start(unit, lambda: f"a module expected after {reader()}")
            self.tally.ahead += 1
            ahead += size


def _too_much(who: str, elements: int, live: int, held: str, limit: int, most: int) -> StoreError:
    return StoreError(
        f"{who} needs {elements} elements whole beside {live} of {held}, which are in use: more than "
        f"max_live_parameters {limit} and one module ({most} in all); raise it to at least {live + elements}"
    )


def _storage(tensor: torch.Tensor) -> int:
    """The storage that a tensor is in, which may be without data; views of it are in the same."""
    return tensor.untyped_storage()._cdata


def _looking_at(buffer: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(_storage(buffer)))
