"""Parameters and their masters as flat buffers, one of each per unit, replicated or sharded by their placements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.sharding import sharded_param
from mpispeed.sharding.collecting import Collector
from mpispeed.sharding.gather import UnitGather, UnitGatherer
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.quantized import Codes
from mpispeed.store.arena import Arena
from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.stored_tensor import MemoryTensor, StoredTensor
from mpispeed.store.table import Unit
from mpispeed.store.tiers import IN_MEMORY, MASTER, PARAM, Tiers
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Wait, Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.table import Table


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


class ParamStore(ParamShards):
    """Parameters that the model computes with, and the high-precision masters that the optimizer updates.

    At rest a unit is one tensor: the full flat buffer, of which the parameters are views, or this rank's shard of it,
    and the parameters are sharded. Where compute and master dtype agree, the master is a slice of that tensor and costs
    no memory of its own. Frozen units have no masters.
    """

    is_apart: Callable[[], bool] = staticmethod(lambda: False)  # parameters are this rank's own, and not its masters

    def __init__(
        self,
        table: Table,
        mesh: Mesh,
        *,
        compute: torch.dtype | None,
        master: torch.dtype,
        master_placement: Placement,
        param_placement: Placement = REPLICATED,
        second: Placement | None = None,
        resident: Collection[int] = (),
        gather: UnitGather = all_gather_into,
        codes_frozen: bool = False,
        own_masters: bool = False,
        tiers: Tiers = IN_MEMORY,
        collector: Collector | None = None,
    ) -> None:
        """Take over the parameters of `table`; all ranks start from the values of the first data rank.

        Args:
            table: the units.
            mesh: the ranks.
            compute: dtype to compute in; None: that of each unit's parameters.
            master: dtype of masters.
            master_placement: placement of masters.
            param_placement: placement of parameters at rest, a prefix of `master_placement`.
            second: placement of second copies, taken while a unit is unsharded and gathered from until the next update;
                a prefix of `param_placement`.
            resident: indices of persistent units, never sharded.
            gather: carries out gathers.
            codes_frozen: keep and gather sharded frozen units as 8-bit codes.
            own_masters: masters have memory of their own even if they have the dtype of the parameters.
            tiers: the states in swap files; units with parameters there are fetched like sharded ones.
            collector: brings updated masters to replicated parameters; by all-gathers of whole units by default.

        Collective over: the data axis of `mesh`.
        """
        self.table, self.mesh, self.tiers = table, mesh, tiers
        self.compute, self.master_dtype, self.placement = compute, master, master_placement
        self.arena, self._codes_frozen, self._own_masters = Arena(tiers.device), codes_frozen, own_masters
        self._gatherer = UnitGatherer(mesh, gather=gather, second=second)
        self.collector = collector or Collector(device=tiers.device)
        is_cut = mesh.topology.group_size(param_placement.axes) > 1 or tiers.is_apart(PARAM)  # then it is fetched too
        self._placements = [
            param_placement if (is_cut and unit.index not in resident) or tiers.holds(PARAM, unit.index) else REPLICATED
            for unit in table.all_units
        ]
        self._rest: list[StoredTensor] = []
        self._masters: list[StoredTensor] = []
        self._shared: set[int] = set()
        self._marks: dict[int, list[tuple[int, int]]] = {}  # versions and addresses of what became whole
        self._names = {id(param): place.entry.name for param, place in table.all_places()}
        self.prefetcher: Gatherer | None = None
        self.reader: Reader | None = None
        self.wait: Wait = lambda work, _: work.wait()
        self.is_of_init = False
        self.rests_cut = not param_placement.is_replicated
        for unit in table.all_units:
            self._adopt(unit)

    def _adopt(self, unit: Unit) -> None:
        source = torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self.tiers.device)
        # Parameters that zero.Init sharded over all data ranks have equal values there.
        alike = [
            getattr(sharded_param.owner_of(p), "ranks", ()) if sharded_param.is_sharded(p) else () for p in unit.params
        ]
        is_init_sharded = all(set(self.mesh["data"].ranks) <= set(ranks) for ranks in alike)
        _refuse_taken(unit)
        with sharded_param.opened(unit.params, "initialize"):
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                source[entry.span.slice].copy_(param.detach().reshape(-1))
        if not is_init_sharded:
            self.mesh["data"].broadcast(source)
        compute, master = self.dtypes(unit)
        own, span = self.rest_span(unit), self.span(unit)
        rest = source[own.slice].to(compute, copy=not self.is_resident(unit) and not self.tiers.is_apart(PARAM))
        if not self.is_resident(unit):
            rest = self.tiers.bring(PARAM, rest, compute, copies=False)
        if self._codes_frozen and not unit.is_trainable and not self.is_resident(unit) and Codes.takes(compute):
            self._gatherer.codes[unit.index] = Codes(rest)
            rest = rest[:0].clone()
        self._rest.append(self.tiers.keep(PARAM, unit.index, rest))
        # Masters of another dtype start from the model as given, before it is rounded to the compute dtype.
        if not unit.is_trainable:
            self._masters.append(MemoryTensor(rest[:0].clone()))
        elif master != compute or self._own_masters or self.tiers.home(MASTER) != rest.device:
            values = self.tiers.bring(MASTER, source[span.slice], master, copies=True)
            self._masters.append(self.tiers.keep(MASTER, unit.index, values))
        else:
            self._shared.add(unit.index)
            is_same = own == span and self._rest[-1].is_swapped
            self._masters.append(self._rest[-1] if is_same else MemoryTensor(rest[span.shifted(-own.start).slice]))
        if self.is_resident(unit):
            self.unshard(unit, rest)
        else:
            self.reshard(unit)

    def connect(self, wait: Wait, prefetcher: Gatherer | None = None, reader: Reader | None = None) -> None:
        """Set the parts that unshard: `prefetcher` gathers sharded units, `reader` answers stray reads.

        Called once, by the builder of these parts; `wait` waits for started communication.
        """
        self.wait, self.prefetcher, self.reader = wait, prefetcher, reader

    # -- shard and unshard -----------------------------------------------------------------------------------------

    def unshard(self, unit: Unit, full: torch.Tensor) -> None:
        """Make the unit's parameters views of `full`. Shapes: full [padded]."""
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            sharded_param.to_unsharded(param, full[entry.span.slice].view(entry.shape))
            sharded_param.watch(param, self)
        self._mark(unit)

    def _mark(self, unit: Unit) -> None:
        self._marks[unit.index] = [(param._version, param.data_ptr()) for param in unit.params]

    def reshard(self, unit: Unit) -> None:
        """Make the unit's parameters sharded."""
        for param in unit.params:
            sharded_param.to_sharded(param, self, self.dtypes(unit)[0], self.tiers.device)

    def start_gather(self, channel: Mesh, unit: Unit, full: torch.Tensor, reader: Callable[[], str]) -> Work:
        """Start to fill `full` with the full unit, from the second copy while that is fresh.

        Collective over: the axes over which the unit, or its second copy, is sharded.
        """
        source, shard = self._placements[unit.index], self._rest[unit.index]
        return self._gatherer.start(channel, unit, full, shard, source, reader)

    @property
    def swapped_bytes(self) -> int:
        """Parameters and masters of this rank in swap files."""
        own = [stored for index, stored in enumerate(self._masters) if index not in self._shared]
        return sum(stored.file_bytes for stored in (*self._rest, *own))

    def publish(self, unit: Unit) -> None:
        """Bring updated masters to the parameters; the rule has filled the low-precision copy already.

        Collective over: the axes over which masters are sharded and parameters are not.
        """
        self._gatherer.forget(unit)
        # Swapped parameters have the placement of masters: the update has written them already.
        if unit.is_trainable and not self._rest[unit.index].is_swapped:
            rest, own = self._rest[unit.index].get(), self.rest_span(unit)
            local = rest[self.span(unit).shifted(-own.start).slice]
            target = self._placements[unit.index]
            self.collector.collect(self.mesh, rest, local, self.placement, target, unit.layout.padded)

    def publish_all(self) -> None:
        """Bring all updated masters to the parameters; unsharded copies are let go first.

        Collective over: the axes over which masters are sharded.
        """
        if self.prefetcher is not None:
            self.prefetcher.reshard_all()
        for unit in self.table.units:
            self.publish(unit)

    def refresh(self) -> None:
        """Recompute parameters from masters, after masters were loaded or edited.

        Collective over: the axes over which masters are sharded; the data axis if anything is swapped.

        Raises:
            StoreError: on every rank, if swapped states of one could not be read or written.
        """
        with self.mesh["data"].together(StoreError) if self.tiers.is_swapping else nullcontext():
            for unit in self.table.units:
                if self.low_precision(unit) is not None:
                    self.fill(unit, self.master(unit))
        self.publish_all()

    @contextmanager
    def whole(self, units: Sequence[Unit]) -> Iterator[None]:
        """Context in which the parameters of `units` can be read, outside of forward and backward.

        Collective over: the axes over which parameters are sharded at rest.
        """
        cut = [unit for unit in units if not self.is_resident(unit)]
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

    def collected(self, unit: Unit) -> torch.Tensor:
        """A copy of the full unit as it is stored, without the rounding of quantized gathers.

        Collective over: the axes over which the unit is sharded; the data axis if it is swapped.
        Shapes: [padded].

        Raises:
            StoreError: on every rank, if one cannot read its part from its swap file.
        """
        with self.mesh["data"].together(StoreError) if self._rest[unit.index].is_swapped else nullcontext():
            shard = self.rest(unit)
        full = torch.empty(unit.layout.padded, dtype=self.dtypes(unit)[0], device=self.tiers.device)
        all_gather_into(self.mesh, full, shard, self._placements[unit.index], REPLICATED, unit.layout.padded)
        return full

    def take(self, param: nn.Parameter) -> None:
        """Keep the values of a parameter that was unsharded and edited: in this rank's shard and in its master.

        Values have to be equal on all ranks of the data axis. Local.

        Raises:
            UsageError: the model has this rank's own parameters, which a 1-bit optimizer updates locally.
            StoreError: the parameter is not unsharded now.
        """
        if self.is_apart():
            msg = (
                f"parameter {self._names.get(id(param), '?')!r} was edited between meetings of 0/1 Adam, where it is "
                "this rank's own; call engine.eval() before, and engine.train() afterwards"
            )
            raise UsageError(msg)
        place = self.table.locate(param)
        if place is None or sharded_param.is_sharded(param):
            msg = f"parameter {self._names.get(id(param), '?')!r} is not whole; there is nothing to take over"
            raise StoreError(msg)
        unit, entry = place.unit, place.entry
        values = param.detach().reshape(-1)
        targets = [(self.rest_span(unit), self.rest, self.put_rest), (self.span(unit), self.master, self.put_master)]
        for span, get, put in targets:
            common = entry.span.intersect(span)
            if common.numel:
                tensor = get(unit)
                tensor[common.shifted(-span.start).slice].copy_(values[common.shifted(-entry.offset).slice])
                put(unit, tensor)
        self._mark(unit)

    def give_back(self) -> None:
        """Make every parameter an ordinary, full one again.

        Collective over: the axes over which parameters are sharded at rest.

        Raises:
            StoreError: on every rank, if swapped parameters of one cannot be read; what could not be read stays
                sharded.
        """
        if self.prefetcher is not None:
            self.prefetcher.abandon()
        problem: StoreError | None = None
        for unit in self.table.all_units:
            if not self.is_resident(unit):
                try:
                    self.unshard(unit, self.collected(unit))
                except StoreError as error:
                    problem = problem or error
        for unit in self.table.all_units:
            for param in unit.params:
                if problem is None or not sharded_param.is_sharded(param):
                    sharded_param.forget(param)
        self.tiers.close()
        if problem is not None:
            raise problem

    # -- as an owner ---------------------------------------------------------------------------------------------

    def describe(self, param: nn.Parameter) -> str:
        """Name and placement, for messages and `repr`."""
        place = self.table.locate(param)
        axes = self._placements[place.unit.index].axes if place else ()
        ranks = self.mesh.topology.group_size(axes)
        where = " and swapped out" if place is not None and self._rest[place.unit.index].is_swapped else ""
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

    def left(self, param: nn.Parameter) -> None:
        """Do nothing: the new owner has all of `param`."""


def find_edited(params: ParamStore, unit: Unit) -> str:
    """Name of a parameter of `unit` that was edited in place or given other data since it was unsharded, else "".

    Changes through `param.data` are not seen: torch does not count them.
    """
    pairs = zip(unit.layout.entries, unit.params, params._marks.get(unit.index, ()), strict=False)
    changed = (e.name for e, param, mark in pairs if (param._version, param.data_ptr()) != mark)
    return next(changed, "")


def find_unbound(params: ParamStore) -> str:
    """Name of a persistent parameter that does not view its unit's memory any more, else ""."""
    for unit in params.table.units:
        if params.is_resident(unit):
            for entry, param, mark in zip(unit.layout.entries, unit.params, params._marks[unit.index], strict=True):
                if entry.numel and param.data_ptr() != mark[1]:
                    return entry.name
    return ""


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
