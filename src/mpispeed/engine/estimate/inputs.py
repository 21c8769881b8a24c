"""Inputs of a prediction of memory and traffic, read off a plan and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.mesh.mesh import Topology
from mpispeed.optim.choice import build
from mpispeed.optim.rule import KeepsState, Rule, Window
from mpispeed.plan.offload_plan import Cells, Offload, leading_units, make_swap_plan, offload_of
from mpispeed.plan.onebit_plan import OneBitPlan, onebit_plan_of
from mpispeed.plan.units import deal_units
from mpispeed.sharding.collecting import Collecting
from mpispeed.sharding.leaf import mark_leaves_by_threshold
from mpispeed.sharding.prefetch import Limits
from mpispeed.sharding.quantized import Codes
from mpispeed.sharding.units import choose_resident
from mpispeed.store.placement import REPLICATED, Placement, Tier
from mpispeed.store.tiers import GRAD, MASTER, PARAM, SwapPlan

if TYPE_CHECKING:
    from mpispeed.plan.plan import Plan
    from mpispeed.store.layout import Table, Unit

ADAM_SLOTS = ("exp_avg", "exp_avg_sq")
"""States assumed for an optimizer that is given in code."""


@dataclass(frozen=True)
class EstimateInputs:
    """Inputs of a prediction.

    Attributes:
        model: on any device; only shapes and dtypes are read.
        table: its units.
        topology: the ranks.
        param, grad, master: placements of these.
        second: placement of second copies of parameters; None: there are none.
        compute: dtype that floating parameters are cast to, or None.
        accumulate: dtype of stored gradients.
        communicate: dtype of gradients in reductions; None: the unit's own.
        state_bytes: bytes of optimizer states for each element.
        micro_steps: forward and backward passes of one optimizer step.
        is_overlapped: gradients are reduced while backward runs.
        resident: indices of units that stay unsharded although the plan shards parameters.
        limits: limits of the prefetcher.
        codes_params: parameters are gathered in 8-bit quantization.
        codes_frozen: frozen parameters are gathered and stored in 8-bit quantization.
        codes_grads: gradients are reduced in 4-bit quantization.
        keeps_sum_errors: quantized reductions keep their errors (LoCo).
        scatters: gradients are reduce-scattered; False: they are all-reduced.
        is_init_sharded: the model is sharded as it is constructed, layer by layer.
        slots: names of the optimizer's state tensors, where they are flat.
        offload: settings of states outside the device.
        copies_checkpoint: checkpoints are copied and written in the background.
        gathers_once: sharded parameters are gathered once for all micro-batches of a step.
        collecting: how updated parameters are collected.
        coding: plan of a 1-bit optimizer; None for other optimizers.
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
    keeps_sum_errors: bool = False
    scatters: bool = True
    is_init_sharded: bool = False
    slots: tuple[str, ...] = ADAM_SLOTS
    offload: Offload = field(default_factory=Offload)
    copies_checkpoint: bool = False
    gathers_once: bool = False
    collecting: Collecting = field(default_factory=Collecting)
    coding: OneBitPlan | None = None

    def dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a unit, as `ParamStore.dtypes`."""
        if unit.dtype == torch.float64 or not unit.dtype.is_floating_point:
            return unit.dtype, unit.dtype
        return unit.dtype if self.compute is None else self.compute, torch.float32

    def grad_dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes in which gradients of a unit are stored and reduced, as `GradStore` decides."""
        if unit.dtype == torch.float64:
            return unit.dtype, unit.dtype
        return self.accumulate, unit.dtype if self.communicate is None else self.communicate

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""
        return unit.layout.padded // math.prod(self.topology.group_size(axis) for axis in placement.axes)

    def rest(self, unit: Unit) -> Placement:
        """Placement of the unit's parameters; those in files are gathered as if they were sharded."""
        is_cut = self.topology.group_size(self.param.axes) > 1 and unit.index not in self.resident
        return self.param if is_cut or (PARAM, unit.index) in self.tensors else REPLICATED

    def is_resident(self, unit: Unit) -> bool:
        """True if the unit's parameters are never sharded."""
        return self.rest(unit).is_replicated

    def is_shared(self, unit: Unit) -> bool:
        """True if the unit's masters are its parameters."""
        compute, master = self.dtypes(unit)
        return compute == master and not (self.coding is not None and self.coding.own_masters)

    def is_coded(self, unit: Unit) -> bool:
        """True if the unit's shards are stored in 8-bit quantization."""
        return self.codes_frozen and not unit.is_trainable and Codes.takes(self.dtypes(unit)[0])

    # -- tiers -----------------------------------------------------------------------------------------------------

    @cached_property
    def outside(self) -> frozenset[int]:
        """Trained units whose masters and states are on the tier of `master`; the others are on the device."""
        units = self.table.units
        total = sum(unit.layout.padded for unit in units)
        return leading_units(((unit.index, unit.layout.padded) for unit in units), self.offload.ratio * total)

    @cached_property
    def tensors(self) -> Cells:
        """States that one rank keeps in swap files."""
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
        """Swap files and buffers of one rank; ConfigError if a buffer is too short."""
        return make_swap_plan(self.tensors, self.offload, self.table)

    def param_tier(self, unit: Unit) -> Tier:
        """Tier of the unit's parameters."""
        if unit.index in self.resident:
            return Tier.DEVICE
        if self.param.tier == Tier.NVME and (PARAM, unit.index) not in self.tensors:
            return Tier.HOST
        return self.param.tier

    def state_tier(self, unit: Unit) -> Tier:
        """Tier of the unit's optimizer states, and of its masters unless they are its parameters."""
        return self.master.tier if unit.index in self.outside else Tier.DEVICE

    def grad_tier(self, unit: Unit) -> Tier:
        """Tier of the unit's gradients."""
        return self.grad.tier if unit.index in self.outside else Tier.DEVICE


def gather_inputs(
    plan: Plan,
    model: nn.Module,
    *,
    is_init_sharded: bool = False,
    group_of: Mapping[int, int] | None = None,
    slots: Sequence[str] | None = None,
    rule: Rule | None = None,
) -> EstimateInputs:
    """Read the inputs of a prediction off a plan and a model.

    Args:
        plan: the settings for so many ranks.
        model: on any device; its parameters may be sharded already.
        is_init_sharded: it is built inside zero.Init.
        group_of: parameter group index by `id` of the parameter; all trainable parameters by default.
        slots: names of the optimizer's flat state tensors; by default those of the plan's optimizer, or Adam's.
        rule: the optimizer, where `slots` are given; None: not a 1-bit optimizer.

    Raises:
        ConfigError: the optimizer is unknown, refuses its settings, or is a 1-bit optimizer that the plan rules out.
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
    return EstimateInputs(
        model=model,
        table=table,
        topology=topology,
        param=states.param,
        grad=states.grad,
        master=states.master,
        second=states.second,
        compute=plan.policy.compute if is_cast else None,
        accumulate=plan.policy.accumulate if plan.config.data_types.grad_accum_dtype else torch.float32,
        communicate=plan.policy.communicate if is_cast or plan.config.communication_data_type is not None else None,
        state_bytes=state_bytes,
        micro_steps=plan.batch.gradient_accumulation_steps,
        is_overlapped=plan.is_overlapped and topology.group_size("data") > 1,
        resident=resident,
        limits=plan.fetch_limits,
        codes_params=zero.zero_quantized_weights,
        codes_frozen=zero.zero_quantized_nontrainable_weights,
        codes_grads=zero.zero_quantized_gradients and plan.placing.sum_hops is not None,
        keeps_sum_errors=zero.zeropp_loco_param is not None,
        scatters=zero.reduce_scatter,
        is_init_sharded=is_init_sharded,
        slots=names,
        offload=offload_of(zero),
        copies_checkpoint=plan.config.checkpoint.async_save,
        gathers_once=plan.gathers_once,
        coding=onebit_plan_of(plan, rule),
        collecting=plan.collecting,
    )


def _all_trainable(model: nn.Module) -> dict[int, int]:
    return {id(param): 0 for param in model.parameters() if param.requires_grad}


def _slots(plan: Plan) -> tuple[tuple[str, ...], int, Rule | None]:
    """Names of optimizer states, their bytes for each fp32 element, and the rule.

    For a rule that keeps its own state, they are read off after one update of a small window.
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
