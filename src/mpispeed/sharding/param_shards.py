"""Shards of parameters and masters on this rank, and the gathers that unshard them: plain, in codes, or from copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from mpispeed.base.errors import StoreError
from mpispeed.mesh.comm import text_of
from mpispeed.sharding import sharded_param
from mpispeed.sharding.collecting import Collector
from mpispeed.sharding.quantized import Codes
from mpispeed.store import host_memory
from mpispeed.store.arena import Arena
from mpispeed.store.coded_tensor import CodedTensor, draw_base
from mpispeed.store.layout import Span
from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.stored_tensor import MemoryTensor, StoredTensor
from mpispeed.store.tiers import IN_MEMORY, MASTER, PARAM, Tiers
from mpispeed.store.transfers import all_gather_into, own_span

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Table, Unit
    from mpispeed.store.state_code import StateCode
    from mpispeed.store.stored_tensor import Lease


class OffloadStateTypeEnum(str, Enum):
    """States that `engine.offload_states` takes out of memory; the plain strings mean the same.

    Source: names and meaning as in DeepSpeed's documentation of `offload_states`.
    """

    optim_states = "optim_states"
    """State of the optimizer."""
    hp_params = "hp_params"
    """Masters that are not the parameters themselves."""
    lp_params = "lp_params"
    """Parameters that the model computes with; in fp32 training they are the masters too."""
    lp_grads = "lp_grads"
    """Accumulated gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Scratch buffers that nobody uses; they are freed, and made again when they are needed."""

    def __str__(self) -> str:
        return self.value


class UnitGather(Protocol):
    """Carries out a gather, plain or quantized."""

    def __call__(
        self, mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
    ) -> None:
        """As `store.transfers.all_gather_into`."""


class UnitGatherer:
    """Gathers units; holds second copies and the codes of frozen shards.

    Source: ZeRO++ (arXiv 2306.10209): hpZ: the second copy is taken while a unit is unsharded, and gathers read it
    until the next update.
    """

    def __init__(self, mesh: Mesh, *, gather: UnitGather = all_gather_into) -> None:
        """Args: `gather` carries out gathers of shards that are no codes."""
        self._mesh, self._gather = mesh, gather
        self._copies: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        self.codes: dict[int, Codes] = {}

    def start(
        self, channel: Mesh, unit: Unit, full: torch.Tensor, rest: StoredTensor, reader: Callable[[], str]
    ) -> Work:
        """Start to fill `full` with the whole unit; `rest` is this rank's shard.

        Collective over: the axes over which the unit, or its second copy while that is fresh, is sharded.

        Raises:
            StoreError: from the work's `wait`, on every rank, if one of them cannot read its shard.
        """
        codes, source, second = self.codes.get(unit.index), unit.states.param, unit.states.second
        copy = self._copies[unit.index] if unit.index in self._fresh else None
        if copy is not None and second is not None:
            source = second
        # Reading begins now, before the channel gets to the gather.
        lease = rest.lend(0, rest.numel) if copy is None and codes is None else None

        def collect(_: Any) -> None:
            if copy is not None:
                all_gather_into(channel, full, copy, source, REPLICATED, unit.layout.padded)
                return
            if codes is not None:
                codes.all_gather_into(channel, full, source, REPLICATED)
            elif lease is not None:
                self._gather(channel, full, lease.wait(), source, REPLICATED, unit.layout.padded)
            if second is not None:
                self._take(second, unit, full)

        work = channel[source.axes].start(
            collect,
            "fetch",
            label=f"unit {unit.index}",
            describe=lambda: f"the parameters of {unit.name!r} for {reader()}",
            ready=partial(_outcome, lease) if lease is not None and rest.is_swapped else None,
        )
        if lease is not None:
            # Also when another rank cannot read its shard.
            work.after(partial(lease.give_back, changed=False))
        return work

    def _take(self, second: Placement, unit: Unit, full: torch.Tensor) -> None:
        part = full[own_span(self._mesh, second, unit.layout.padded).slice]
        if unit.index in self._copies:
            self._copies[unit.index].copy_(part)
        else:
            with torch.inference_mode(False):  # later gathers write to it outside of that mode
                self._copies[unit.index] = part.clone()
        self._fresh.add(unit.index)

    def copy_of(self, unit: Unit) -> tuple[torch.Tensor, Span] | None:
        """The second copy of a unit while it is fresh, and its range of the flat buffer."""
        second = unit.states.second
        if unit.index not in self._fresh or second is None:
            return None
        return self._copies[unit.index], own_span(self._mesh, second, unit.layout.padded)

    def forget(self, unit: Unit) -> None:
        """Mark the second copy of `unit` as out of date."""
        self._fresh.discard(unit.index)

    def drop_copies(self) -> None:
        """Free second copies."""
        self._copies.clear()
        self._fresh.clear()

    @property
    def second_bytes(self) -> int:
        """Bytes of second copies on this rank."""
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def code_bytes(self) -> int:
        """Bytes of quantized shards on this rank."""
        return sum(codes.nbytes for codes in self.codes.values())


def _outcome(lease: Lease) -> str | None:
    """State of a lease: None while it is pending, "" once the data are here, else the error."""
    if not lease.is_ready():
        return None
    try:
        lease.wait()
    except StoreError as error:
        return str(error)
    return ""


class ParamShards:
    """Parameters that the model computes with, and their masters: one tensor of each per unit.

    At rest a unit is one tensor: the full flat buffer, of which the parameters are views, or this rank's shard of it,
    and the parameters are sharded. Where compute and master dtype agree, the master is a slice of that tensor and costs
    no memory of its own. Frozen units have no masters.

    Attributes:
        gatherer: gathers units; has second copies and codes.
        marks: versions and addresses of the parameters of a unit when it was unsharded.
    """

    def __init__(
        self,
        table: Table,
        mesh: Mesh,
        *,
        gather: UnitGather = all_gather_into,
        tiers: Tiers = IN_MEMORY,
        collector: Collector | None = None,
    ) -> None:
        """Start empty; `adopt` fills it, unit by unit.

        Args:
            table: the units, whose states say where everything will be.
            mesh: the ranks.
            gather: carries out gathers.
            tiers: the states in swap files.
            collector: brings updated masters to replicated parameters; by all-gathers of whole units by default.
        """
        self.table, self.mesh, self.tiers = table, mesh, tiers
        self.arena = Arena(tiers.device)
        self.gatherer = UnitGatherer(mesh, gather=gather)
        self.collector = collector or Collector(device=tiers.device)
        self._rest: list[StoredTensor] = []
        self._masters: list[StoredTensor] = []
        self.marks: dict[int, list[tuple[int, int]]] = {}

    def adopt(self, unit: Unit, source: torch.Tensor) -> None:
        """Keep what is ours of the next unit, in the order of their indices, and make its parameters what they rest as.

        Shapes: source [padded], in the dtype of the unit.
        """
        states, own, span = unit.states, self.rest_span(unit), self.span(unit)
        compute, is_resident = states.compute, states.param.is_replicated
        is_copied = not is_resident and not self.tiers.is_apart(PARAM, unit.index)
        rest = host_memory.copied(source[own.slice], compute) if is_copied else source[own.slice].to(compute)
        if not is_resident:
            rest = self.tiers.bring(PARAM, unit.index, rest, compute, copies=False)
        if states.is_coded:
            self.gatherer.codes[unit.index] = Codes(rest)
            rest = rest[:0].clone()
        self._rest.append(self.tiers.keep(PARAM, unit.index, rest))
        # Masters of another dtype start from the model as given, before it is rounded to the compute dtype.
        if not unit.is_trainable:
            self._masters.append(MemoryTensor(rest[:0].clone()))
        elif states.codes.master is not None:
            self._masters.append(self._coded_master(unit, source[span.slice]))
        elif not states.master_is_param:
            values = self.tiers.bring(MASTER, unit.index, source[span.slice], states.full, copies=True)
            self._masters.append(self.tiers.keep(MASTER, unit.index, values))
        else:
            self._masters.append(self._part_of_rest(unit))
        if is_resident:
            self.unshard(unit, rest)
        else:
            self.reshard(unit)

    def _part_of_rest(self, unit: Unit) -> StoredTensor:
        """The range of the masters in the parameters at rest, which were kept last."""
        rest, own, span = self._rest[-1], self.rest_span(unit), self.span(unit)
        return rest if own == span and rest.is_swapped else MemoryTensor(rest.get()[span.shifted(-own.start).slice])

    def _coded_master(self, unit: Unit, source: torch.Tensor) -> StoredTensor:
        """Masters that rest in a code, made from the model's parameters."""
        states, code = unit.states, unit.states.codes.master
        param = self._part_of_rest(unit) if states.master_is_param else None
        numel, base = self.span(unit).numel, draw_base(unit.layout.entries[0].name, self.span(unit).start)
        made = self.tiers.coded(MASTER, unit.index, numel, cast("StateCode", code), base=base, param=param)
        try:
            # Of the parameters as rounded: a pair of the given values may begin one place beside them, and other ranks
            # and devices have parameters of their own until the first update.
            made.put(source.to(states.compute).to(states.full))
        except Exception as error:  # as in `Tiers.keep`: the other ranks go on
            if not made.is_swapped:
                raise
            self.tiers.problem = self.tiers.problem or text_of(error)
        return made

    # -- the parameters of the model ---------------------------------------------------------------------------------

    def unshard(self, unit: Unit, full: torch.Tensor) -> None:
        """Make the unit's parameters views of `full`. Shapes: full [padded]."""
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            sharded_param.to_unsharded(param, full[entry.span.slice].view(entry.shape))
        self.mark(unit)

    def mark(self, unit: Unit) -> None:
        """Note the versions and addresses of the unit's parameters, to find those that are edited."""
        self.marks[unit.index] = [(param._version, param.data_ptr()) for param in unit.params]

    def reshard(self, unit: Unit) -> None:
        """Make the unit's parameters sharded."""
        for param in unit.params:
            sharded_param.to_sharded(param, unit.states.compute, self.tiers.device)

    def start_gather(self, channel: Mesh, unit: Unit, full: torch.Tensor, reader: Callable[[], str]) -> Work:
        """Start to fill `full` with the full unit, from the second copy while that is fresh.

        Collective over: the axes over which the unit, or its second copy, is sharded.
        """
        return self.gatherer.start(channel, unit, full, self._rest[unit.index], reader)

    def collected(self, unit: Unit) -> torch.Tensor:
        """A copy of the full unit as it is stored, without the rounding of quantized gathers.

        Collective over: the axes over which the unit is sharded; the data axis if it is swapped.
        Shapes: [padded].

        Raises:
            StoreError: on every rank, if one cannot read its part from its swap file.
        """
        with self.mesh["data"].together(StoreError) if self._rest[unit.index].is_swapped else nullcontext():
            shard = self.rest(unit)
        full = torch.empty(unit.layout.padded, dtype=unit.states.compute, device=self.tiers.device)
        all_gather_into(self.mesh, full, shard, unit.states.param, REPLICATED, unit.layout.padded)
        return full

    def publish(self, unit: Unit) -> None:
        """Bring updated masters to the parameters; the rule has filled the low-precision copy already.

        Collective over: the axes over which masters are sharded and parameters are not.
        """
        self.gatherer.forget(unit)
        # Swapped parameters have the placement of masters: the update has written them already.
        if unit.is_trainable and not self._rest[unit.index].is_swapped:
            rest, own = self._rest[unit.index].get(), self.rest_span(unit)
            local = rest[self.span(unit).shifted(-own.start).slice]
            states = unit.states
            self.collector.collect(self.mesh, rest, local, states.master, states.param, unit.layout.padded)

    # -- where things are ----------------------------------------------------------------------------------------

    def rest_span(self, unit: Unit) -> Span:
        """The range of the unit's flat buffer that this rank holds at rest."""
        return own_span(self.mesh, unit.states.param, unit.layout.padded)

    def span(self, unit: Unit) -> Span:
        """The range of the unit's flat buffer whose masters this rank holds; empty for frozen units."""
        if not unit.is_trainable:
            return Span(0, 0)
        return own_span(self.mesh, unit.states.master, unit.layout.padded)

    # -- values ------------------------------------------------------------------------------------------------------

    def stored_shard(self, unit: Unit) -> StoredTensor:
        """The stored tensor of the parameters that this rank holds between uses."""
        return self._rest[unit.index]

    def rest(self, unit: Unit) -> torch.Tensor:
        """This rank's shard of the parameters, in compute dtype; a copy where it is quantized or swapped.

        Shapes: [rest_span(unit).numel].
        """
        codes = self.gatherer.codes.get(unit.index)
        return self._rest[unit.index].get() if codes is None else codes.values()

    def put_rest(self, unit: Unit, values: torch.Tensor) -> None:
        """Set this rank's shard; copies nothing if `values` are what `rest` returned.

        Shapes: values [rest_span(unit).numel].
        """
        codes = self.gatherer.codes.get(unit.index)
        if codes is not None:
            codes.keep(values)
        else:
            self._rest[unit.index].put(values)
        self.gatherer.forget(unit)

    def stored_master(self, unit: Unit) -> StoredTensor:
        """The stored tensor of this rank's masters."""
        return self._masters[unit.index]

    def master(self, unit: Unit) -> torch.Tensor:
        """This rank's masters: themselves if they are in memory, else a copy. Shapes: [span(unit).numel]."""
        return self._masters[unit.index].get()

    def put_master(self, unit: Unit, values: torch.Tensor) -> None:
        """Set the masters here; copies nothing if `values` are what `master` returned from memory."""
        self._masters[unit.index].put(values)

    def fill(self, unit: Unit, values: torch.Tensor) -> None:
        """Fill the unit's low-precision copy here, where there is one; masters stay. Local.

        Shapes: values as the master.

        Raises:
            StoreError: a swap file cannot be written.
        """
        low = self.low_precision(unit)
        if low is None:
            return
        stored, start = low
        if stored.is_swapped:  # it is cut as the masters are
            stored.put(values.to(stored.dtype))
        else:
            stored.get()[start : start + self.span(unit).numel].copy_(values)

    def low_precision(self, unit: Unit) -> tuple[StoredTensor, int] | None:
        """The destination of rounded masters, and the offset of their range in it; None if they are the parameters."""
        if not unit.is_trainable or unit.states.master_is_param:
            return None
        return self._rest[unit.index], self.span(unit).start - self.rest_span(unit).start

    # -- bytes -------------------------------------------------------------------------------------------------------

    @property
    def param_bytes(self) -> int:
        """Parameters at rest in memory, frozen ones that are in units included."""
        return sum(rest.memory_bytes for rest in self._rest) + self.gatherer.code_bytes

    @property
    def second_bytes(self) -> int:
        """Second copies."""
        return self.gatherer.second_bytes

    @property
    def master_bytes(self) -> int:
        """Masters in memory that are not the parameters themselves."""
        return sum(stored.memory_bytes for stored in self._own_masters())  # of coded ones without parameters

    @property
    def swapped_bytes(self) -> int:
        """Parameters and masters of this rank in swap files."""
        return sum(stored.file_bytes for stored in (*self._rest, *self._own_masters()))

    def _own_masters(self) -> Iterator[StoredTensor]:
        pairs = zip(self.table.all_units, self._masters, strict=False)  # fewer until all units are adopted
        return (stored for unit, stored in pairs if not unit.states.master_is_param or isinstance(stored, CodedTensor))


def find_edited(shards: ParamShards, unit: Unit) -> str:
    """Name of a parameter of `unit` that was edited in place or given other data since it was unsharded, else "".

    Changes through `param.data` are not seen: torch does not count them.
    """
    pairs = zip(unit.layout.entries, unit.params, shards.marks.get(unit.index, ()), strict=False)
    changed = (e.name for e, param, mark in pairs if (param._version, param.data_ptr()) != mark)
    return next(changed, "")


def find_unbound(shards: ParamShards) -> str:
    """Name of a persistent parameter that does not view its unit's memory any more, else ""."""
    for unit in shards.table.units:
        if unit.states.param.is_replicated:
            for entry, param, mark in zip(unit.layout.entries, unit.params, shards.marks[unit.index], strict=True):
                if entry.numel and param.data_ptr() != mark[1]:
                    return entry.name
    return ""
