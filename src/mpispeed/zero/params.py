"""Parameters and their masters as flat buffers, one of each per unit, whole or cut as their placements say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.store.arena import Arena
from mpispeed.store.cell import Cell, MemoryCell
from mpispeed.store.move import widen
from mpispeed.store.placement import WHOLE, Placement
from mpispeed.store.tiers import IN_MEMORY, MASTER, PARAM, Tiers
from mpispeed.zero import guard
from mpispeed.zero.collect import Collector, Widener
from mpispeed.zero.holdings import Holdings
from mpispeed.zero.kinds import OffloadStateTypeEnum as Kind
from mpispeed.zero.quantized import Codes

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Wait, Work
    from mpispeed.optim.rule import Rule
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.fetch import Fetcher
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.walk import StateStore


class Reader(Protocol):
    """Who decides whether a sealed parameter may be read now."""

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """As `guard.Keeper.open`."""

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """As `guard.Keeper.close`."""


class ParamStore(Holdings):
    """Holds what the model computes with and the high-precision masters that the optimizer updates.

    At rest a unit's parameters are one tensor: the whole flat buffer, whose views the parameters are, or this rank's
    cut of it, and the parameters are sealed. Where compute and master dtype agree, the master is a slice of that
    tensor and costs no memory of its own. Frozen units have no masters.
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
        param_placement: Placement = WHOLE,
        second: Placement | None = None,
        resident: Collection[int] = (),
        widener: Widener = widen,
        codes_frozen: bool = False,
        own_masters: bool = False,
        tiers: Tiers = IN_MEMORY,
    ) -> None:
        """Take over the parameters of `table`; all ranks start from the values of the first data rank.

        Args:
            table: the units.
            mesh: the ranks.
            compute: dtype to compute in; None: every unit is computed with in the dtype it came in.
            master: dtype of masters.
            master_placement: how masters are cut.
            param_placement: how parameters rest; it begins `master_placement`.
            second: how a second copy is cut that is taken when a unit was whole, and gathered from until the next
                update; it begins `param_placement`.
            resident: indices of units that rest whole all the same.
            widener: how cut parameters come together.
            codes_frozen: keep and gather cut frozen units as 8-bit codes.
            own_masters: masters have memory of their own also where they are of the dtype of the parameters.
            tiers: what of it rests in swap files; units with parameters there are fetched as cut ones are.

        Collective over: the data axis of `mesh`.
        """
        self.table, self.mesh, self.tiers = table, mesh, tiers
        self.compute, self.master_dtype, self.placement = compute, master, master_placement
        self.arena, self._codes_frozen, self._own_masters = Arena(tiers.device), codes_frozen, own_masters
        self._collector = Collector(mesh, widener=widener, second=second)
        is_cut = mesh.topology.group_size(param_placement.axes) > 1 or tiers.is_apart(PARAM)  # then it is fetched too
        self._placements = [
            param_placement if (is_cut and unit.index not in resident) or tiers.holds(PARAM, unit.index) else WHOLE
            for unit in table.all_units
        ]
        self._rest: list[Cell] = []
        self._masters: list[Cell] = []
        self._shared: set[int] = set()
        self._marks: dict[int, list[tuple[int, int]]] = {}  # versions and addresses of what became whole
        self._names = {id(param): place.entry.name for param, place in table.all_places()}
        # What access by parameter needs; set by whoever puts the parts together.
        self.fetcher: Fetcher | None = None
        self.reader: Reader | None = None
        self.grads: GradStore | None = None
        self.states: StateStore | None = None
        self.rule: Rule | None = None
        self.groups: Sequence[dict[str, Any]] = ()
        self.wait: Wait = lambda work, _: work.wait()
        self.rests_cut = not param_placement.is_whole
        for unit in table.all_units:
            self._adopt(unit)

    def _adopt(self, unit: Unit) -> None:
        source = torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self.tiers.device)
        # What zero.Init cut over all data ranks has equal values there.
        group_sizes = [getattr(guard.keeper_of(p), "group_size", 0) if guard.is_sealed(p) else 0 for p in unit.params]
        is_born_cut = min(group_sizes, default=0) >= self.mesh["data"].size
        _refuse_taken(unit)
        with guard.opened(unit.params, "initialize"):
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                source[entry.span.slice].copy_(param.detach().reshape(-1))
        if not is_born_cut:
            self.mesh["data"].broadcast(source)
        compute, master = self.dtypes(unit)
        own, span = self.rest_span(unit), self.span(unit)
        rest = source[own.slice].to(compute, copy=not self.is_resident(unit) and not self.tiers.is_apart(PARAM))
        if not self.is_resident(unit):
            rest = self.tiers.bring(PARAM, rest, compute, copies=False)
        if self._codes_frozen and not unit.is_trainable and not self.is_resident(unit) and Codes.takes(compute):
            self._collector.codes[unit.index] = Codes(rest)
            rest = rest[:0].clone()
        self._rest.append(self.tiers.keep(PARAM, unit.index, rest))
        # Masters of another dtype start from the model as given, before it is rounded to the compute dtype.
        if not unit.is_trainable:
            self._masters.append(MemoryCell(rest[:0].clone()))
        elif master != compute or self._own_masters or self.tiers.home(MASTER) != rest.device:
            values = self.tiers.bring(MASTER, source[span.slice], master, copies=True)
            self._masters.append(self.tiers.keep(MASTER, unit.index, values))
        else:
            self._shared.add(unit.index)
            is_same = own == span and self._rest[-1].is_swapped
            self._masters.append(self._rest[-1] if is_same else MemoryCell(rest[span.shifted(-own.start).slice]))
        if self.is_resident(unit):
            self.show(unit, rest)
        else:
            self.hide(unit)

    # -- whole and cut -----------------------------------------------------------------------------------------

    def show(self, unit: Unit, full: torch.Tensor) -> None:
        """Make the unit's parameters views of `full`. Shapes: full [padded]."""
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            guard.unseal(param, full[entry.span.slice].view(entry.shape))
            guard.watch(param, self)
        self._mark(unit)

    def _mark(self, unit: Unit) -> None:
        self._marks[unit.index] = [(param._version, param.data_ptr()) for param in unit.params]

    def hide(self, unit: Unit) -> None:
        """Seal the unit's parameters."""
        for param in unit.params:
            guard.seal(param, self, self.dtypes(unit)[0], self.tiers.device)

    def start_collect(self, lane: Mesh, unit: Unit, full: torch.Tensor, reader: Callable[[], str]) -> Work:
        """Start to fill `full` with the whole unit, from the second copy if that is of use.

        Collective over: the axes by which the unit, or its second copy, is cut.
        """
        source, shard = self._placements[unit.index], self._rest[unit.index]
        return self._collector.start(lane, unit, full, shard, source, reader)

    @property
    def swapped_bytes(self) -> int:
        """Parameters and masters of this rank in swap files."""
        own = [cell for index, cell in enumerate(self._masters) if index not in self._shared]
        return sum(cell.file_bytes for cell in (*self._rest, *own))

    def publish(self, unit: Unit) -> None:
        """Bring updated masters to where parameters rest; the rule has filled the low-precision copy already.

        Collective over: the axes by which masters are cut and parameters are not.
        """
        self._collector.forget(unit)
        # What is swapped rests as masters are cut: the update has brought it there already.
        if unit.is_trainable and not self._rest[unit.index].is_swapped:
            rest, own = self._rest[unit.index].get(), self.rest_span(unit)
            local = rest[self.span(unit).shifted(-own.start).slice]
            widen(self.mesh, rest, local, self.placement, self._placements[unit.index], unit.layout.padded)

    def publish_all(self) -> None:
        """Bring all updated masters to where parameters rest; whole copies of cut ones are let go first.

        Collective over: the axes by which masters are cut.
        """
        if self.fetcher is not None:
            self.fetcher.drop_all()
        for unit in self.table.units:
            self.publish(unit)

    def refresh(self) -> None:
        """Make parameters of masters, after masters were loaded or edited.

        Collective over: the axes by which masters are cut; the data axis if anything is swapped.

        Raises:
            StoreError: on every rank, if swapped states of one could not be read or written.
        """
        problem = ""
        try:
            for unit in self.table.units:
                if self.low_precision(unit) is not None:
                    self.fill(unit, self.master(unit))
        except StoreError as error:
            problem = str(error)
        if self.tiers.is_swapping:
            self.mesh["data"].agree(not problem, problem, StoreError)
        self.publish_all()

    @contextmanager
    def whole(self, units: Sequence[Unit]) -> Iterator[None]:
        """The time in which the parameters of `units` can be read, outside of forward and backward.

        Collective over: the axes by which parameters rest cut.
        """
        cut = [unit for unit in units if not self.is_resident(unit)]
        if not cut:
            yield
            return
        if self.fetcher is None:
            msg = "these parameters are cut and there is nothing that gathers them: their engine is closed"
            raise StoreError(msg)
        self.fetcher.open(cut)
        try:
            yield
        finally:
            self.fetcher.close(cut)

    def collected(self, unit: Unit) -> torch.Tensor:
        """A copy of the whole unit as it rests, without the rounding that coded gathers have.

        Collective over: the axes by which the unit is cut; the data axis if it is swapped.
        Shapes: [padded].

        Raises:
            StoreError: on every rank, if one cannot read its part from its swap file.
        """
        shard, problem = None, ""
        try:
            shard = self.rest(unit)
        except StoreError as error:
            problem = str(error)
        if self._rest[unit.index].is_swapped:
            self.mesh["data"].agree(not problem, problem, StoreError)
        if shard is None:
            raise StoreError(problem)
        full = torch.empty(unit.layout.padded, dtype=self.dtypes(unit)[0], device=self.tiers.device)
        widen(self.mesh, full, shard, self._placements[unit.index], WHOLE, unit.layout.padded)
        return full

    def take(self, param: nn.Parameter) -> None:
        """Keep what stands in a parameter that was gathered and edited: in what rests here and in its master.

        Values have to be equal on all ranks of the data axis. Local.

        Raises:
            UsageError: the model has this rank's own parameters, which a 1-bit optimizer moves by itself.
            StoreError: the parameter is not whole now.
        """
        if self.is_apart():
            msg = (
                f"parameter {self._names.get(id(param), '?')!r} was edited between meetings of 0/1 Adam, where it is "
                "this rank's own; call engine.eval() before, and engine.train() afterwards"
            )
            raise UsageError(msg)
        place = self.table.locate(param)
        if place is None or guard.is_sealed(param):
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
        """Make every parameter an ordinary, whole one again.

        Collective over: the axes by which parameters rest cut.

        Raises:
            StoreError: on every rank, if swapped parameters of one cannot be read; what could not be read stays sealed.
        """
        if self.fetcher is not None:
            self.fetcher.abandon()
        problem: StoreError | None = None
        for unit in self.table.all_units:
            if not self.is_resident(unit):
                try:
                    self.show(unit, self.collected(unit))
                except StoreError as error:
                    problem = problem or error
        for unit in self.table.all_units:
            for param in unit.params:
                if problem is None or not guard.is_sealed(param):
                    guard.forget(param)
        self.tiers.close()
        if problem is not None:
            raise problem

    # -- as a keeper ---------------------------------------------------------------------------------------------

    def describe(self, param: nn.Parameter) -> str:
        """For messages and `repr`."""
        place = self.table.locate(param)
        axes = self._placements[place.unit.index].axes if place else ()
        ranks = self.mesh.topology.group_size(axes)
        where = " and swapped out" if place is not None and self._rest[place.unit.index].is_swapped else ""
        return f"{self._names.get(id(param), 'a parameter')!r} is cut over {ranks} ranks{where}"

    def open(self, params: Sequence[nn.Parameter], reader: str) -> bool:
        """Ask the reader, if there is one. Collective over: the axes by which parameters rest cut."""
        if self.away:
            self.require((Kind.lp_params,), reader)
        return self.reader is not None and self.reader.open(params, reader)

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """The torch function has returned."""
        if self.reader is not None:
            self.reader.close(params)

    def left(self, param: nn.Parameter) -> None:
        """Another keeper has `param` now: nothing to do, it has all of it."""


def find_edited(params: ParamStore, unit: Unit) -> str:
    """Name of a parameter of `unit` that was changed in place or given other data since it became whole, else "".

    Changes through `param.data` are not seen: torch does not count them.
    """
    pairs = zip(unit.layout.entries, unit.params, params._marks.get(unit.index, ()), strict=False)
    changed = (e.name for e, param, mark in pairs if (param._version, param.data_ptr()) != mark)
    return next(changed, "")


def find_unbound(params: ParamStore) -> str:
    """Name of a parameter that is whole all the time and looks at other memory than its unit's, else ""."""
    for unit in params.table.units:
        if params.is_resident(unit):
            for entry, param, mark in zip(unit.layout.entries, unit.params, params._marks[unit.index], strict=True):
                if entry.numel and param.data_ptr() != mark[1]:
                    return entry.name
    return ""


def _refuse_taken(unit: Unit) -> None:
    """Parameters of another engine cannot be taken over.

    Raises:
        UsageError: one is cut and another engine has it, also one that was dropped without `destroy`.
    """
    for entry, param in zip(unit.layout.entries, unit.params, strict=True):
        if guard.is_sealed(param) and isinstance(guard.keeper_of(param), ParamStore):
            msg = (
                f"initialize: parameter {entry.name!r} belongs to another engine {guard.tell(param)}; call "
                "destroy() of that engine first, on all ranks: it gives the model its whole weights back"
            )
            raise UsageError(msg)
