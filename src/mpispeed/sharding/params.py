"""The owner of a model's parameters under an engine: it unshards them on demand and keeps what was changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.sharding import sharded_param
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind
from mpispeed.store import host_memory

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.store.layout import Span, Unit


class Reader(Protocol):
    """Decides whether a sharded parameter may be read now."""

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """As `sharded_param.Owner.open`."""

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """As `sharded_param.Owner.close`."""


class Gatherer(Protocol):
    """Unshards and reshards units; `prefetch.Prefetcher` is one."""

    def open(self, units: Sequence[Unit]) -> None:
        """Hold `units` unsharded for a caller that is no part of a pass."""

    def close(self, units: Sequence[Unit]) -> None:
        """End of `open`."""

    def reshard(self, units: Iterable[Unit]) -> None:
        """Reshard `units` unless somebody holds them."""

    def reshard_all(self) -> None:
        """Reshard everything; raises a StoreError while something is held."""

    def abandon(self) -> None:
        """Drop everything for good."""

    def full(self, unit: Unit) -> torch.Tensor | None:
        """The unit's full buffer while it is there."""

    def settled(self, unit: Unit) -> torch.Tensor | None:
        """The unit's full buffer, once a pending gather has arrived; None if nobody has fetched it."""


_MADE_ALIKE = (
    "initialize: parameter {0!r} is marked to differ between data ranks (mark_distinct), and zero.Init has given all "
    "of them the values of the first; construct it in `with mpispeed.base.init_scope.paused():`, and mark it there"
)


class ParamStore:
    """Parameters of a model that one engine trains, as their owner: whoever reads a sharded one is answered here.

    Attributes:
        shards: the parameters at rest, and their masters.
        prefetcher: gathers sharded units; None where nothing is sharded.
        reader: answers stray reads; None where nothing is sharded.
        wait: waits for started communication; its second argument is the reason, for messages.
        away: kinds of states that `engine.offload_states` took away.
        rests_cut: True if parameters may be sharded while nobody needs them, as at stage 3.
        keeps_values: False: sharded parameters are left without values in the end, instead of being gathered.
    """

    is_of_init = False

    def __init__(
        self,
        shards: ParamShards,
        *,
        rests_cut: bool = False,
        prefetcher: Gatherer | None = None,
        reader: Reader | None = None,
        wait: Wait = lambda work, _: work.wait(),
    ) -> None:
        """Take over the parameters of the table of `shards`; ranks with copies start from the values of the first.

        Collective over: the data axis of the mesh.

        Raises:
            UsageError: a parameter belongs to another engine.
        """
        self.shards, self.prefetcher, self.reader, self.wait = shards, prefetcher, reader, wait
        self.table, self.mesh, self.tiers, self.arena = shards.table, shards.mesh, shards.tiers, shards.arena
        self.rests_cut, self.keeps_values = rests_cut, True
        self.away: frozenset[str] = frozenset()
        self._names = {id(param): place.entry.name for param, place in self.table.all_places()}
        for unit in self.table.all_units:
            self._adopt(unit)
        host_memory.trim()  # of the model as it was given

    def _adopt(self, unit: Unit) -> None:
        if self.tiers.device.type == "cpu":
            source = host_memory.zeros(unit.layout.padded, unit.dtype)
        else:
            source = torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self.tiers.device)
        # Parameters that zero.Init sharded over all ranks with copies have equal values there.
        comm = self.mesh[unit.states.partial]
        alike = [
            getattr(sharded_param.owner_of(p), "ranks", ()) if sharded_param.is_sharded(p) else () for p in unit.params
        ]
        if unit.states.differs_over_data and not all(set(ranks) <= set(comm.ranks) for ranks in alike):
            raise UsageError(_MADE_ALIKE.format(unit.layout.entries[0].name))
        is_init_sharded = all(set(comm.ranks) <= set(ranks) for ranks in alike)
        _refuse_taken(unit)
        with sharded_param.opened(unit.params, "initialize"):
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                source[entry.span.slice].copy_(param.detach().reshape(-1))
        if not is_init_sharded:
            comm.broadcast(source)
        self.shards.adopt(unit, source)
        for param in unit.params:
            sharded_param.watch(param, self)

    def require(self, kinds: Collection[str], caller: str) -> None:
        """Check that states of these kinds are here.

        Raises:
            UsageError: `engine.offload_states` took some of them away.
        """
        missing = sorted(self.away.intersection(kinds))
        if missing:
            msg = (
                f"{caller} needs {', '.join(missing)}, which engine.offload_states() took away; call "
                "engine.reload_states() first, on all ranks"
            )
            raise UsageError(msg)

    def publish_all(self) -> None:
        """Bring all updated masters to the parameters; unsharded copies are let go first.

        Collective over: the axes over which masters are sharded.
        """
        if self.prefetcher is not None:
            self.prefetcher.reshard_all()
        for unit in self.table.units:
            self.shards.publish(unit)

    def refresh(self) -> None:
        """Recompute parameters from masters, after masters were loaded or edited.

        Collective over: the axes over which masters are sharded; the data axis if anything is swapped.

        Raises:
            StoreError: on every rank, if swapped states of one could not be read or written.
        """
        with self.mesh["data"].together(StoreError) if self.tiers.is_swapping else nullcontext():
            for unit in self.table.units:
                if self.shards.low_precision(unit) is not None:
                    self.shards.fill(unit, self.shards.master(unit))
        self.publish_all()

    @contextmanager
    def whole(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context in which the parameters of `units` can be read, outside of forward and backward.

        Collective over: the axes over which parameters are sharded at rest.
        """
        cut = [unit for unit in units if not unit.states.param.is_replicated]
        if not cut:
            yield
            return
        if self.prefetcher is None:
            msg = "these parameters are cut and there is nothing that gathers them: their engine is closed"
            raise StoreError(msg)
        self.prefetcher.open(cut)
        try:
            yield
        finally:
            self.prefetcher.close(cut)

    def take(self, param: nn.Parameter) -> None:
        """Keep the values of a parameter that was unsharded and edited: in this rank's shard and in its master.

        Values have to be equal on all ranks that have copies. Local.

        Raises:
            StoreError: the parameter is not unsharded now.
        """
        place = self.table.locate(param)
        if place is None or sharded_param.is_sharded(param):
            msg = f"parameter {self._names.get(id(param), '?')!r} is not whole; there is nothing to take over"
            raise StoreError(msg)
        unit, entry = place.unit, place.entry
        values = param.detach().reshape(-1)
        shards = self.shards
        targets = [
            (shards.rest_span(unit), shards.rest, shards.put_rest),
            (shards.span(unit), shards.master, shards.put_master),
        ]
        for span, get, put in targets:
            common = entry.span.intersect(span)
            if common.numel:
                tensor = get(unit)
                tensor[common.shifted(-span.start).slice].copy_(values[common.shifted(-entry.offset).slice])
                put(unit, tensor)
        self.shards.mark(unit)

    def give_back(self) -> None:
        """Make every parameter an ordinary, full one again; without `keeps_values` those without data stay so.

        Collective over: the axes over which parameters are sharded at rest.

        Raises:
            StoreError: on every rank, if swapped parameters of one cannot be read; what could not be read stays
                sharded.
        """
        if self.prefetcher is not None:
            self.prefetcher.abandon()
        problem: StoreError | None = None
        for unit in self.table.all_units:
            if self.keeps_values and not unit.states.param.is_replicated:
                try:
                    self.shards.unshard(unit, self.shards.collected(unit))
                except StoreError as error:
                    problem = problem or error
        for unit in self.table.all_units:
            for param in unit.params:
                if not sharded_param.is_sharded(param):
                    sharded_param.forget(param)
        self.tiers.close()
        if problem is not None:
            raise problem

    # -- as an owner ---------------------------------------------------------------------------------------------

    def describe(self, param: nn.Parameter) -> str:
        """Name and placement, for messages and `repr`."""
        place = self.table.locate(param)
        axes = place.unit.states.param.axes if place else ()
        ranks = self.mesh.topology.group_size(axes)
        where = " and swapped out" if place is not None and self.shards.stored_shard(place.unit).is_swapped else ""
        return f"{self._names.get(id(param), 'a parameter')!r} is cut over {ranks} ranks{where}"

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Ask the reader, if there is one. Collective over: the axes over which parameters are sharded at rest."""
        if self.away:
            self.require((Kind.lp_params,), reader)
        return self.reader is not None and self.reader.open(params, reader)

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Tell the reader that the torch function has returned."""
        if self.reader is not None:
            self.reader.close(params)

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's shard at rest. Local."""
        self.require((Kind.lp_params,), "param.ds_tensor")
        unit, common = self._shard(param)
        return self.shards.rest(unit)[common.shifted(-self.shards.rest_span(unit).start).slice].clone()

    def shard_numel(self, param: nn.Parameter) -> int:
        """Elements of this rank's shard at rest. Local."""
        return self._shard(param)[1].numel

    def second_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of this rank's part of the second copy; None while there is none or it is out of date. Local."""
        self.require((Kind.lp_params,), "param.ds_secondary_tensor")
        place = self.table.locate(param)
        found = None if place is None else self.shards.gatherer.copy_of(place.unit)
        if place is None or found is None:
            return None
        values, span = found
        return values[place.entry.span.intersect(span).shifted(-span.start).slice].clone()

    def _shard(self, param: nn.Parameter) -> tuple[Unit, Span]:
        place = self.table.locate(param)
        if place is None:
            sharded_param.refuse(param, "param.ds_tensor")
        return place.unit, place.entry.span.intersect(self.shards.rest_span(place.unit))

    def left(self, param: nn.Parameter) -> None:
        """Do nothing: the new owner has all of `param`."""


def _refuse_taken(unit: Unit) -> None:
    """Parameters of another engine cannot be taken over.

    Raises:
        UsageError: one is sharded and belongs to another engine, also to one that was dropped without `destroy`.
    """
    for entry, param in zip(unit.layout.entries, unit.params, strict=True):
        if sharded_param.is_sharded(param) and isinstance(sharded_param.owner_of(param), ParamStore):
            msg = (
                f"initialize: parameter {entry.name!r} belongs to another engine {sharded_param.tell(param)}; call "
                "destroy() of that engine first, on all ranks: it gives the model its whole weights back"
            )
            raise UsageError(msg)
