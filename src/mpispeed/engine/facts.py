"""Everything that a prediction of memory and traffic follows from, read off a plan and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.engine.coding import Coding, coding_of
from mpispeed.engine.offload import Cells, Offload, leading_units, make_swap_plan, offload_of
from mpispeed.engine.sharing import kinds_of
from mpispeed.mesh.topology import Topology
from mpispeed.optim.choice import build
from mpispeed.optim.rule import KeepsState, Rule, Window
from mpispeed.store.placement import WHOLE, Placement, Tier
from mpispeed.store.tiers import GRAD, MASTER, PARAM, SwapPlan
from mpispeed.zero.fetch import Limits
from mpispeed.zero.leaf import mark_leaves_by_threshold
from mpispeed.zero.quantized import Codes
from mpispeed.zero.units import choose_resident, plan_units

if TYPE_CHECKING:
    from mpispeed.engine.plan import Plan
    from mpispeed.store.table import Table, Unit

ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""What is assumed of an optimizer that is given in code."""


@dataclass(frozen=True)
class Facts:
    """Everything that a prediction follows from.

    Attributes:
        model: on any device; only shapes and dtypes are read.
        table: its units.
        topology: the ranks.
        param, grad, master: where these rest.
        second: how second copies of parameters are cut; None: there are none.
        compute: dtype that floating parameters are cast to, or None.
        accumulate: dtype of gradients at rest.
        communicate: dtype of gradients that travel; None: the unit's own.
        state_bytes: of the optimizer, for each element.
        micro_steps: forward and backward passes of one optimizer step.
        is_overlapped: gradients are summed while backward runs.
        resident: indices of units that rest whole all the same.
        limits: budgets of fetching.
        codes_params: parameters travel as 8-bit codes.
        codes_frozen: frozen parameters travel and rest as 8-bit codes.
        codes_grads: gradients travel as 4-bit codes.
        scatters: gradients are scattered as they are summed; False: they are summed whole everywhere.
        is_born_cut: the model is built cut already, layer by layer.
        slots: names of the optimizer's state tensors, where they are flat.
        offload: how states rest outside the device.
        copies_checkpoint: checkpoints are copied and written while training goes on.
        gathers_once: parameters that rest cut are gathered once for all micro-batches of a step.
        coding: how a 1-bit optimizer codes; None: the optimizer is another one.
    """

    model: nn.Module
    table: Table
    topology: Topology
    param: Placement
    grad: Placement
    master: Placement
    second: Placement | None
    compute: torch.dtype | None
    accumulate: torch.dtype
    communicate: torch.dtype | None
    state_bytes: int
    micro_steps: int
    is_overlapped: bool
    resident: frozenset[int]
    limits: Limits
    codes_params: bool = False
    codes_frozen: bool = False
    codes_grads: bool = False
    scatters: bool = True
    is_born_cut: bool = False
    slots: tuple[str, ...] = ADAM_SLOTS
    offload: Offload = field(default_factory=Offload)
    copies_checkpoint: bool = False
    gathers_once: bool = False
    coding: Coding | None = None

    def dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a unit, as `ParamStore.dtypes`."""
        if unit.dtype == torch.float64 or not unit.dtype.is_floating_point:
            return unit.dtype, unit.dtype
        return unit.dtype if self.compute is None else self.compute, torch.float32

    def grad_dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """In which gradients of a unit rest and travel, as `GradStore` decides."""
        if unit.dtype == torch.float64:
            return unit.dtype, unit.dtype
        return self.accumulate, unit.dtype if self.communicate is None else self.communicate

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""
        return unit.layout.padded // math.prod(self.topology.group_size(axis) for axis in placement.axes)

    def rest(self, unit: Unit) -> Placement:
        """Where the unit's parameters rest; what rests in files is fetched as if it were cut."""
        is_cut = self.topology.group_size(self.param.axes) > 1 and unit.index not in self.resident
        return self.param if is_cut or (PARAM, unit.index) in self.cells else WHOLE

    def is_resident(self, unit: Unit) -> bool:
        """True if the unit's parameters are whole all the time."""
        return self.rest(unit).is_whole

    def is_shared(self, unit: Unit) -> bool:
        """True if the unit's masters are its parameters."""
        compute, master = self.dtypes(unit)
        return compute == master and not (self.coding is not None and self.coding.own_masters)

    def is_coded(self, unit: Unit) -> bool:
        """True if the unit's parameters rest as 8-bit codes where they are cut."""
        return self.codes_frozen and not unit.is_trainable and Codes.takes(self.dtypes(unit)[0])

    # -- tiers -----------------------------------------------------------------------------------------------------

    @cached_property
    def outside(self) -> frozenset[int]:
        """Trained units whose masters and states are on the tier of `master`; the others are on the device."""
        units = self.table.units
        total = sum(unit.layout.padded for unit in units)
        return leading_units(((unit.index, unit.layout.padded) for unit in units), self.offload.ratio * total)

    @cached_property
    def cells(self) -> Cells:
        """What one rank keeps in swap files."""
        found: dict[tuple[str, int], tuple[int, torch.dtype]] = {}
        if self.param.tier == Tier.NVME:
            others = [u for u in self.table.all_units if u.index not in self.resident and not self.is_coded(u)]
            sizes = [(unit.index, self.span(unit, self.param)) for unit in others]
            in_memory = leading_units(sizes, self.offload.memory_elements)
            for unit, (index, size) in zip(others, sizes, strict=True):
                if index not in in_memory:
                    found[PARAM, index] = size, self.dtypes(unit)[0]
        for unit in self.table.units:
            if self.state_tier(unit) == Tier.NVME:
                size, dtype = self.span(unit, self.master), self.dtypes(unit)[1]
                for kind in (*([] if self.is_shared(unit) else [MASTER]), *self.slots):
                    found[kind, unit.index] = size, dtype
            if self.grad_tier(unit) == Tier.NVME:
                found[GRAD, unit.index] = self.span(unit, self.grad), self.grad_dtypes(unit)[0]
        return found

    @cached_property
    def swap(self) -> SwapPlan:
        """Files and buffers of one rank; `ConfigError` where a buffer is too short."""
        return make_swap_plan(self.cells, self.offload, self.table)

    def param_tier(self, unit: Unit) -> Tier:
        """Where the unit's parameters rest."""
        if unit.index in self.resident:
            return Tier.DEVICE
        if self.param.tier == Tier.NVME and (PARAM, unit.index) not in self.cells:
            return Tier.HOST
        return self.param.tier

    def state_tier(self, unit: Unit) -> Tier:
        """Where the unit's optimizer states rest, and its masters unless they are its parameters."""
        return self.master.tier if unit.index in self.outside else Tier.DEVICE

    def grad_tier(self, unit: Unit) -> Tier:
        """Where the unit's gradients rest."""
        return self.grad.tier if unit.index in self.outside else Tier.DEVICE


def gather_facts(
    plan: Plan,
    model: nn.Module,
    *,
    is_born_cut: bool = False,
    group_of: Mapping[int, int] | None = None,
    slots: Sequence[str] | None = None,
    rule: Rule | None = None,
) -> Facts:
    """Read off a plan and a model what a prediction needs.

    Args:
        plan: the settings for so many ranks.
        model: on any device; its parameters may be cut already.
        is_born_cut: it is built inside of zero.Init.
        group_of: parameter group index by `id` of the parameter; all trainable parameters by default.
        slots: names of the optimizer's flat state tensors; by default what the plan's optimizer has, or Adam's.
        rule: the optimizer, where `slots` are given; None: one that does not code.

    Raises:
        ConfigError: the optimizer is unknown, refuses its settings, or cannot code under the plan.
    """
    zero, states, topology = plan.config.zero_optimization, plan.states, plan.topology()
    if slots is None:
        names, state_bytes, rule = _slots(plan)
    else:
        names, state_bytes = tuple(slots), 4 * len(slots)
    table = deal_units(plan, model, _all_trainable(model) if group_of is None else group_of)
    mark_leaves_by_threshold(model, zero.module_granularity_threshold)
    resident = frozenset(choose_resident(table, zero.param_persistence_threshold, zero.model_persistence_threshold))
    is_cast = plan.config.fp16.enabled or plan.config.bf16.enabled
    is_wire_set = is_cast or plan.config.communication_data_type is not None
    return Facts(
        model=model,
        table=table,
        topology=topology,
        param=states.param,
        grad=states.grad,
        master=states.master,
        second=states.second,
        compute=plan.policy.compute if is_cast else None,
        accumulate=plan.policy.accumulate if plan.config.data_types.grad_accum_dtype else torch.float32,
        communicate=plan.policy.communicate if is_wire_set else None,
        state_bytes=state_bytes,
        micro_steps=plan.batch.gradient_accumulation_steps,
        is_overlapped=plan.is_overlapped and topology.group_size("data") > 1,
        resident=resident,
        limits=_limits(plan),
        codes_params=zero.zero_quantized_weights,
        codes_frozen=zero.zero_quantized_nontrainable_weights,
        codes_grads=zero.zero_quantized_gradients and plan.placing.hops is not None,
        scatters=zero.reduce_scatter,
        is_born_cut=is_born_cut,
        slots=names,
        offload=offload_of(zero),
        copies_checkpoint=plan.config.checkpoint.async_save,
        gathers_once=plan.gathers_once,
        coding=coding_of(plan, rule),
    )


def deal_units(plan: Plan, model: nn.Module, group_of: Mapping[int, int]) -> Table:
    """The units of a model under a plan; `group_of` is as for `zero.units.plan_units`."""
    zero, topology = plan.config.zero_optimization, plan.topology()
    return plan_units(
        model,
        group_of,
        topology.group_size("data"),
        plan.bucket_elements,
        merge_elements=zero.param_persistence_threshold,
        takes_frozen=not plan.states.param.is_whole,
        kind_of=kinds_of(model, topology.group_size("model")),
    )


def _all_trainable(model: nn.Module) -> dict[int, int]:
    return {id(param): 0 for param in model.parameters() if param.requires_grad}


def _limits(plan: Plan) -> Limits:
    zero = plan.config.zero_optimization
    ahead = zero.prefetch_bucket_size if plan.is_overlapped else 0
    return Limits(ahead=ahead, live=zero.max_live_parameters, reuse=zero.max_reuse_distance)


def _slots(plan: Plan) -> tuple[tuple[str, ...], int, Rule | None]:
    """Names of optimizer states, and their bytes for each fp32 element: of the rule, or what one update leaves.

    Then the rule.
    """
    if plan.optimizer_name is None:
        return ADAM_SLOTS, 4 * len(ADAM_SLOTS), None
    rule, defaults = build(plan.optimizer_name, plan.optimizer_params)
    if not isinstance(rule, KeepsState):
        return rule.state_names, 4 * len(rule.state_names), rule
    window = Window(torch.zeros(16), torch.ones(16), {}, {**defaults}, 1, key=(0, 0, 0))
    rule.update([window])
    found = rule.slots(window.key)
    return tuple(found), sum(slot.element_size() for slot in found.values()), rule
