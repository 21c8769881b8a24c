"""Inputs of a prediction of memory and traffic, read off a plan and a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.engine.matrix_groups import groups_of, slots_apart
from mpispeed.exchange.cost import SUMS_ALONE, ExchangeCost
from mpispeed.exchange.table import kind_of
from mpispeed.mesh.dry import DryWorld
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.optim.choice import build
from mpispeed.optim.rule import KeepsState, Rule, Window
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.offload_plan import make_swap_plan, offload_of, slots_in_files, swapped_cells
from mpispeed.plan.units import deal_units
from mpispeed.sharding.leaf import mark_leaves_by_threshold
from mpispeed.store.placement import Placement, Tier
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
        plan: the settings for so many ranks.
        model: on any device; only shapes and dtypes are read.
        table: its units, with their states.
        state_bytes: bytes of optimizer states for each element.
        micro_steps: forward and backward passes of one optimizer step.
        is_overlapped: gradients are reduced while backward runs.
        is_init_sharded: the model is sharded as it is constructed, layer by layer.
        slots: names of the optimizer's state tensors, where they are flat.
        exchange: costs of the exchange of gradients.
        rule: the optimizer, if it is known.
    """

    plan: Plan
    model: nn.Module
    table: Table
    state_bytes: int
    micro_steps: int
    is_overlapped: bool
    is_init_sharded: bool = False
    slots: tuple[str, ...] = ADAM_SLOTS
    exchange: ExchangeCost = SUMS_ALONE
    rule: Rule | None = None

    @cached_property
    def topology(self) -> Topology:
        """The ranks."""
        return self.plan.topology()

    @property
    def master(self) -> Placement:
        """Placement of masters, but for units whose states say otherwise."""
        return self.plan.states.master

    def state_sizes(self, unit: Unit, numel: int) -> tuple[int, int]:
        """Bytes of optimizer states for `numel` elements of a unit, and those among them of scales of 8-bit codes."""
        states = unit.states
        codes = [states.codes.slot(slot) for slot in states.slots_among(self.slots)]
        if not any(codes):
            return numel * self.state_bytes_of(unit) * states.full.itemsize // 4, 0
        total = sum(numel * states.full.itemsize if code is None else code.nbytes(numel) for code in codes)
        return total, total - sum(numel * (states.full if code is None else code.dtype).itemsize for code in codes)

    def state_tier(self, unit: Unit) -> Tier:
        """Tier of the optimizer's states of a unit: that of its masters, unless they stay in memory."""
        tier, names = unit.states.master.tier, unit.states.slots_among(self.slots)
        is_kept = tier is Tier.NVME and names and not slots_in_files(self.plan.config, names)
        return Tier.HOST if is_kept else tier

    def dry_mesh(self) -> Mesh:
        """The ranks, seen from the first rank of the model's pipeline stage; nothing moves."""
        topology, model = self.topology, self.model
        places = dict.fromkeys(topology.names, 0)
        if isinstance(model, PipelineModule) and topology.group_size("pipe") > 1:
            places["pipe"] = model.stage_id
        return Mesh(topology, DryWorld(topology.rank(**places), topology.size))

    def state_bytes_of(self, unit: Unit) -> int:
        """Bytes of optimizer states for each fp32 element of a unit."""
        return self.state_bytes if unit.states.slots is None else 4 * len(unit.states.slots_among(self.slots))

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""
        return unit.layout.padded // math.prod(self.topology.group_size(axis) for axis in placement.axes)

    @cached_property
    def swap(self) -> SwapPlan:
        """Swap files and buffers of one rank; ConfigError if a buffer is too short."""
        cells, offload = (
            swapped_cells(self.table, self.topology, slots_in_files(self.plan.config, self.slots)),
            offload_of(self.plan.config.zero_optimization),
        )
        return make_swap_plan(cells, offload, self.table)


def gather_inputs(
    plan: Plan,
    model: nn.Module,
    *,
    is_init_sharded: bool = False,
    group_of: Mapping[int, int] | None = None,
    slots: Sequence[str] | None = None,
    rule: Rule | None = None,
    slots_of: Mapping[int, tuple[str, ...]] | None = None,
) -> EstimateInputs:
    """Read the inputs of a prediction off a plan and a model.

    Args:
        plan: the settings for so many ranks.
        model: on any device; its parameters may be sharded already.
        is_init_sharded: it is built inside zero.Init.
        group_of: parameter group index by `id` of the parameter; all trainable parameters by default.
        slots: names of the optimizer's flat state tensors; by default those of the plan's optimizer, or Adam's.
        rule: the optimizer, where `slots` are given; None: one whose gradients are summed.
        slots_of: as for `plan.units.deal_units`; by default as the plan's optimizer has them.

    Raises:
        ConfigError: the optimizer is unknown, refuses its settings, or is one that the plan rules out.
    """
    if slots is None:
        names, state_bytes, rule = _slots(plan)
    else:
        names, state_bytes = tuple(slots), 4 * len(slots)
    exchange = kind_of(rule).cost(plan, rule)
    trained = _all_trainable(model) if group_of is None else group_of
    apart = slots_apart(rule, groups_of(model, rule)) if slots is None else slots_of
    table = deal_units(plan, model, trained, own_masters=exchange.own_masters, slots_of=apart)
    mark_leaves_by_threshold(model, plan.config.zero_optimization.module_granularity_threshold)
    return EstimateInputs(
        plan=plan,
        model=model,
        table=table,
        state_bytes=state_bytes,
        micro_steps=plan.batch.gradient_accumulation_steps,
        is_overlapped=plan.is_overlapped and plan.topology().group_size("data") > 1,
        is_init_sharded=is_init_sharded,
        slots=names,
        exchange=exchange,
        rule=rule,
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
