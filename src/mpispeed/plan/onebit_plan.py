"""Exchanges of 1-bit optimizers under a plan, and refusal of plans that rule them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.optim.exchange import Drifts, Exchange, Exchanges

if TYPE_CHECKING:
    from mpispeed.plan.plan import Plan

PHASES = {
    Exchange.GRADIENT: "full precision",
    Exchange.CODED_GRADIENT: "1-bit gradients",
    Exchange.MOMENTUM: "1-bit momenta",
    Exchange.NOTHING: "local",
    Exchange.DRIFT: "1-bit meeting",
}
"""Names of kinds of steps, by their exchange."""


@dataclass(frozen=True, slots=True)
class OneBitPlan:
    """Exchanges of a 1-bit optimizer.

    Attributes:
        kinds: exchanges in steps that are not in full precision.
        freeze_step: number of the last update that may change the variance.
        hops: axes inside and between nodes, where nodes average before the exchange; else None.
        own_masters: masters have their own memory even if parameters are fp32.
        local_slots: number of states that differ between ranks between synchronisations.
        lends_units: states in files are in memory for whole units in an update, since it needs whole parameters.
    """

    kinds: tuple[Exchange, ...]
    freeze_step: int
    hops: tuple[str, str] | None
    own_masters: bool
    local_slots: int
    lends_units: bool


def onebit_plan_of(plan: Plan, rule: Any) -> OneBitPlan | None:
    """Exchanges of `rule` under a plan; None for other optimizers.

    Raises:
        ConfigError: gradients would be sharded or not in fp32, or masters of local updates would be sharded.
    """
    if not isinstance(rule, Exchanges):
        return None
    name, accumulate = getattr(rule, "name", ""), plan.config.data_types.grad_accum_dtype
    require_whole(plan, rule, name)
    if accumulate and plan.policy.accumulate != torch.float32:
        msg = f"optimizer {name} works on gradients in fp32, found data_types.grad_accum_dtype {accumulate}; remove it"
        raise ConfigError(msg)
    if isinstance(rule, Drifts):
        kinds = Exchange.CODED_GRADIENT, Exchange.NOTHING, Exchange.DRIFT
        return OneBitPlan(kinds, rule.intervals.var_freeze_step, plan.placing.hops, True, len(rule.local_names), False)  # type: ignore[attr-defined]
    lends_units: bool = rule.wants_whole  # type: ignore[attr-defined]
    return OneBitPlan((Exchange.MOMENTUM,), rule.freeze_step, plan.placing.hops, False, 0, lends_units)  # type: ignore[attr-defined]


def require_whole(plan: Plan, rule: Any, name: str) -> None:
    """Require replicated gradients for 1-bit optimizers (in a pipeline they are so at every ZeRO stage), and masters.

    Raises:
        ConfigError: gradients are sharded, or masters of local updates are.
    """
    needed = (plan.states.grad, plan.states.master) if isinstance(rule, Drifts) else (plan.states.grad,)
    if isinstance(rule, Exchanges) and not all(placement.is_replicated for placement in needed):
        msg = (
            f"optimizer {name} lets gradients stay local after its warm-up, and zero_optimization.stage {plan.stage} "
            "cuts them or what is updated from them over ranks; use stage 0 or 1"
        )
        if plan.stage == 1:  # the object is there when the plan is made, what a callable makes is not
            msg = msg.removesuffix("use stage 0 or 1") + "pass the optimizer itself, not a callable, or use stage 0"
        raise ConfigError(msg)
