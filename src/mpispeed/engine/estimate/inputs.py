"""Inputs of a prediction of memory and traffic, read off a plan and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.exchange.cost import SUMS_ALONE, ExchangeCost
from mpispeed.exchange.table import kind_of
from mpispeed.mesh.mesh import Topology
from mpispeed.optim.choice import build
from mpispeed.optim.rule import KeepsState, Rule, Window
from mpispeed.plan.offload_plan import Offload, make_swap_plan, offload_of, swapped_cells
from mpispeed.plan.units import deal_units
from mpispeed.sharding.collecting import Collecting
from mpispeed.sharding.leaf import mark_leaves_by_threshold
from mpispeed.sharding.prefetch import Limits
from mpispeed.store.placement import Placement
from mpispeed.store.tiers import SwapPlan

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
        table: its units, with their states.
        topology: the ranks.
        master: placement of masters, but for units whose states say otherwise.
        compute: dtype that floating tensors outside of units are cast to, or None.
        state_bytes: bytes of optimizer states for each element.
        micro_steps: forward and backward passes of one optimizer step.
        is_overlapped: gradients are reduced while backward runs.
        limits: limits of the prefetcher.
        codes_params: parameters are gathered in 8-bit quantization.
        codes_grads: gradients are reduced in 4-bit quantization.
        keeps_sum_errors: quantized reductions keep their errors (LoCo).
        scatters: gradients are reduce-scattered; False: they are all-reduced.
        is_init_sharded: the model is sharded as it is constructed, layer by layer.
        slots: names of the optimizer's state tensors, where they are flat.
        offload: settings of states outside the device.
        copies_checkpoint: checkpoints are copied and written in the background.
        gathers_once: sharded parameters are gathered once for all micro-batches of a step.
        collecting: how updated parameters are collected.
        exchange: costs of the exchange of gradients.
    """

    model: nn.Module
    table: Table
    topology: Topology
    master: Placement
    compute: torch.dtype | None
    state_bytes: int
    micro_steps: int
    is_overlapped: bool
    limits: Limits
    codes_params: bool = False
    codes_grads: bool = False
    keeps_sum_errors: bool = False
    scatters: bool = True
    is_init_sharded: bool = False
    slots: tuple[str, ...] = ADAM_SLOTS
    offload: Offload = field(default_factory=Offload)
    copies_checkpoint: bool = False
    gathers_once: bool = False
    collecting: Collecting = field(default_factory=Collecting)
    exchange: ExchangeCost = SUMS_ALONE

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""
        return unit.layout.padded // math.prod(self.topology.group_size(axis) for axis in placement.axes)

    @cached_property
    def swap(self) -> SwapPlan:
        """Swap files and buffers of one rank; ConfigError if a buffer is too short."""
        return make_swap_plan(swapped_cells(self.table, self.topology, self.slots), self.offload, self.table)


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
        rule: the optimizer, where `slots` are given; None: one whose gradients are summed.

    Raises:
        ConfigError: the optimizer is unknown, refuses its settings, or is one that the plan rules out.
    """
    zero, topology = plan.config.zero_optimization, plan.topology()
    if slots is None:
        names, state_bytes, rule = _slots(plan)
    else:
        names, state_bytes = tuple(slots), 4 * len(slots)
    exchange = kind_of(rule).cost(plan, rule)
    trained = _all_trainable(model) if group_of is None else group_of
    table = deal_units(plan, model, trained, own_masters=exchange.own_masters)
    mark_leaves_by_threshold(model, zero.module_granularity_threshold)
    return EstimateInputs(
        model=model,
        table=table,
        topology=topology,
        master=plan.states.master,
        compute=plan.policy.compute if plan.cast_by else None,
        state_bytes=state_bytes,
        micro_steps=plan.batch.gradient_accumulation_steps,
        is_overlapped=plan.is_overlapped and topology.group_size("data") > 1,
        limits=plan.fetch_limits,
        codes_params=zero.zero_quantized_weights,
        codes_grads=zero.zero_quantized_gradients and plan.placing.sum_hops is not None,
        keeps_sum_errors=zero.zeropp_loco_param is not None,
        scatters=zero.reduce_scatter,
        is_init_sharded=is_init_sharded,
        slots=names,
        offload=offload_of(zero),
        copies_checkpoint=plan.config.checkpoint.async_save,
        gathers_once=plan.gathers_once,
        exchange=exchange,
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
