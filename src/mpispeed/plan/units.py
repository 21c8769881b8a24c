"""Units of a model under a plan: parameters that are gathered, reduced and updated together, with all their states.

What a run and a prediction have to know of a unit is decided here, once: placements, tiers, dtypes, copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.base.distinct import distinct_over
from mpispeed.config.dtypes import accumulation_dtype
from mpispeed.nn.expert import ExpertModules, RoutedExperts
from mpispeed.nn.tensor import cuts, partial_gradients
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.mixed import find_lowered, find_norms
from mpispeed.plan.offload_plan import leading_units, offload_of
from mpispeed.plan.placements import distinct_factor
from mpispeed.plan.state_dtypes import codes_of
from mpispeed.sharding.quantized import Codes
from mpispeed.sharding.units import Tie, choose_resident, plan_units
from mpispeed.store.placement import REPLICATED, Placement, Tier
from mpispeed.store.state_code import PLAIN as NO_CODES
from mpispeed.store.unit_states import DATA_AXES, Copies, UnitStates

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from mpispeed.mesh.mesh import Topology
    from mpispeed.plan.plan import Plan
    from mpispeed.store.layout import Table, Unit


# -- kinds of parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """The ranks that have copies of a parameter, and what they saw; a unit holds parameters of one kind.

    Attributes:
        copies: groups of ranks along other axes than data that have copies.
        partial: axes over which gradients are partial sums and values equal.
        wire: dtype in which gradients travel; None: that of the plan.
        compute: dtype in which the parameter is used; None: that of the plan.
        slots: names of the optimizer's states of the parameter, where parameters differ in them; else None.
    """

    copies: tuple[Copies, ...] = ()
    partial: tuple[str, ...] = DATA_AXES
    wire: torch.dtype | None = None
    compute: torch.dtype | None = None
    slots: tuple[str, ...] | None = None


PLAIN = Kind()


def kinds_of(model: nn.Module, slices: int) -> dict[int, Kind]:
    """Kind by `id` of the parameter, for all that are not `PLAIN`; `slices` is the size of the model axis."""
    ties: dict[int, str] = {}
    if isinstance(model, PipelineModule) and model.num_stages > 1:
        for key in model.tied_keys():
            tied = model.tied(key)
            if len(tied.stages) > 1:
                ties.update((id(param), key) for _, param in tied.params)
    cut = {name for name, found in cuts(model).items() if found.kind != "replicated"} if slices > 1 else set[str]()
    partial = set(partial_gradients(model)) if slices > 1 else set[str]()
    found: dict[int, Kind] = {}
    for name, param in model.named_parameters():
        copies = []
        if slices > 1 and name not in cut:
            copies.append(Copies("model", is_partial=name in partial))
        if id(param) in ties:
            copies.append(Copies("pipe", ties[id(param)], is_partial=True))
        ranks = distinct_over(param)
        kind = Kind(tuple(copies), (str(distinct_factor(ranks).rest),) if ranks > 1 else DATA_AXES)
        if kind != PLAIN:
            found[id(param)] = kind
    return found


def distinct_sizes(model: nn.Module) -> set[int]:
    """Sizes of the groups of neighbours whose ranks have parameters of their own (`base.distinct`)."""
    layers = {layer.ep_size for layer in model.modules() if isinstance(layer, RoutedExperts)}  # copies lose marks
    return ({distinct_over(param) for param in model.parameters()} | layers) - {1}


def ties_of(model: nn.Module) -> dict[int, Tie]:
    """Ties of the parameters of layers whose experts do not divide over their ranks, by `id`.

    Of modules the last two places of a rank stay in one unit, so that ranks with one expert less have that unit too.
    """
    found: dict[int, Tie] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts) or not layer.experts.num_experts % layer.ep_size:
            continue
        name = f"{path}.{layer.experts_name}" if path else layer.experts_name
        own, most = len(layer.experts.held), -(-layer.experts.num_experts // layer.ep_size)
        if not isinstance(layer.experts, ExpertModules):
            for inner, param in layer.experts.named_parameters():
                found[id(param)] = Tie(f"{name}.{inner}", (param.numel() // own * most,))
            continue
        for place, expert in enumerate(layer.experts.deepspeed_experts):
            for param in expert.parameters() if place >= most - 2 else ():
                found[id(param)] = Tie(name, (param.numel(),) * (2 if own < most else 1))
    return found


def _with_dtypes(plan: Plan, model: nn.Module, kinds: dict[int, Kind]) -> dict[int, Kind]:
    """`kinds`, with the dtypes of parameters that do not have those of the plan."""
    mixed, found = plan.mixed, dict(kinds)
    for key in find_norms(model, mixed):
        found[key] = replace(kinds.get(key, PLAIN), wire=torch.float32, compute=torch.float32)
    # Cut parameters are gathered in the dtype of autocast; whole ones are the masters themselves.
    lowered = None if plan.states.param.is_replicated else mixed.autocast
    for key in find_lowered(model, mixed):
        found[key] = replace(kinds.get(key, PLAIN), wire=mixed.autocast, compute=lowered)
    return found


# -- units -----------------------------------------------------------------------------------------------------------


def deal_units(
    plan: Plan,
    model: nn.Module,
    group_of: Mapping[int, int],
    *,
    own_masters: bool = False,
    slots_of: Mapping[int, tuple[str, ...]] | None = None,
) -> Table:
    """The units of a model under a plan, with their states.

    Args:
        plan: the settings.
        model: on any device; only shapes and dtypes are read.
        group_of: as for `sharding.units.plan_units`.
        own_masters: masters are not the parameters, even if they have their dtype.
        slots_of: names of the optimizer's states by `id` of the parameter, where parameters differ in them; a unit has
            parameters with the same states.
    """
    zero, topology = plan.config.zero_optimization, plan.topology()
    kinds = kinds_of(model, topology.group_size("model"))
    kinds |= {one: replace(kinds.get(one, PLAIN), slots=names) for one, names in (slots_of or {}).items()}
    table = plan_units(
        model,
        group_of,
        topology.group_size("data"),
        plan.bucket_elements,
        merge_elements=zero.param_persistence_threshold,
        takes_frozen=not plan.states.param.is_replicated,
        kind_of=_with_dtypes(plan, model, kinds),
        ties=ties_of(model),
    )
    return table.with_states(_Dealer(plan, topology, table, own_masters=own_masters).states)


class _Dealer:
    """Decides the states of each unit of a table."""

    def __init__(self, plan: Plan, topology: Topology, table: Table, *, own_masters: bool) -> None:
        zero, offload, rows = plan.config.zero_optimization, offload_of(plan.config.zero_optimization), table.units
        self._plan, self._topology, self._own_masters = plan, topology, own_masters
        self._resident = choose_resident(table, zero.param_persistence_threshold, zero.model_persistence_threshold)
        sizes = [(unit.index, unit.layout.padded) for unit in rows]
        self._outside = leading_units(sizes, offload.ratio * sum(size for _, size in sizes))
        self._in_files: Collection[int] = ()
        if plan.states.param.tier is Tier.NVME:
            # The first `max_in_cpu` elements stay in memory, and codes, which are small.
            cut = [u for u in table.all_units if u.index not in self._resident and not self._takes_codes(u)]
            spans = [(unit.index, self._span(unit, plan.states.param)) for unit in cut]
            self._in_files = {index for index, _ in spans} - leading_units(spans, offload.memory_elements)

    def states(self, unit: Unit) -> UnitStates:
        """The states of one unit."""
        plan, states = self._plan, self._plan.states
        kind = _kind(unit)
        compute, full, accumulate, wire = self._dtypes(unit)
        codes = codes_of(plan.config) if unit.is_trainable and full == torch.float32 else NO_CODES
        if codes.master is not None and codes.master.dtype != compute:
            codes = replace(codes, master=None)  # norms in fp32 of a 16-bit model are their own masters
        param, is_outside = self._param(unit), unit.index in self._outside
        has_second = not param.is_replicated and kind.partial == DATA_AXES
        grad, master = (
            Placement(p.axes, p.tier if is_outside else Tier.DEVICE)
            for p in (self._own(unit, states.grad), self._own(unit, states.master))
        )
        # On a device, parameters cannot be masters that rest on the host, nor the other way round.
        is_apart = plan.device.type != "cpu" and (master.tier is Tier.DEVICE) != (
            param.is_replicated or states.param.tier is Tier.DEVICE
        )
        rest = full if codes.master is None else codes.master.dtype
        return UnitStates.of(
            self._topology,
            param=param,
            grad=grad,
            master=master,
            second=states.second if has_second else None,
            partial=kind.partial,
            copies=kind.copies,
            compute=compute,
            full=full,
            accumulate=accumulate,
            wire=wire,
            master_is_param=unit.is_trainable and compute == rest and not self._own_masters and not is_apart,
            codes=codes,
            is_coded=self._takes_codes(unit) and not param.is_replicated,
            slots=kind.slots,
        )

    def _param(self, unit: Unit) -> Placement:
        """Where parameters rest. Those in files or off the device are fetched as if they were sharded."""
        if unit.index in self._resident:
            return REPLICATED
        wanted, plan = self._own(unit, self._plan.states.param), self._plan
        is_apart = plan.device.type != "cpu" and wanted.tier is not Tier.DEVICE
        is_cut = self._topology.group_size(wanted.axes) > 1 or is_apart or unit.index in self._in_files
        in_memory = wanted.tier is Tier.NVME and unit.index not in self._in_files
        return Placement(wanted.axes if is_cut else (), Tier.HOST if in_memory else wanted.tier)

    def _own(self, unit: Unit, placement: Placement) -> Placement:
        """`placement`, over the ranks that have copies of the unit."""
        partial = _kind(unit).partial
        return placement if placement.is_replicated or partial == DATA_AXES else Placement(partial, placement.tier)

    def _span(self, unit: Unit, placement: Placement) -> int:
        return unit.layout.padded // self._topology.group_size(self._own(unit, placement).axes)

    def _takes_codes(self, unit: Unit) -> bool:
        """True if the unit is frozen and rests in 8-bit codes wherever it is sharded."""
        wants = self._plan.config.zero_optimization.zero_quantized_nontrainable_weights and not unit.is_trainable
        return wants and Codes.takes(self._dtypes(unit)[0])

    def _dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]:
        """Of computing, masters, accumulated gradients and messages; fp64 and integers keep theirs throughout."""
        plan = self._plan
        policy, own, is_cast = plan.policy, unit.dtype, bool(plan.cast_by)
        is_kept = own == torch.float64 or not own.is_floating_point
        compute = policy.compute if is_cast and not is_kept else own
        full = own if is_kept else torch.float32
        if own == torch.float64:
            return compute, full, own, own
        kind, accumulate = _kind(unit), torch.float32
        if accumulation_dtype(plan.config) != "fp32":
            accumulate = policy.accumulate
        wire = kind.wire or (policy.communicate if plan.is_wire_set else own)
        return compute if is_kept else kind.compute or compute, full, accumulate, wire


def _kind(unit: Unit) -> Kind:
    return unit.kind if isinstance(unit.kind, Kind) else PLAIN
