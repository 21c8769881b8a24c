"""Exchanges of 1-bit optimizers under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.optim.exchange import Drifts, Exchange
from mpispeed.plan.local_gradients import require_whole

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


def onebit_plan_of(plan: Plan, rule: Any) -> OneBitPlan:
    """Exchanges of `rule`, which is an `Exchanges`, under a plan.

    Raises:
        ConfigError: gradients would be sharded or not in fp32, or masters of local updates would be sharded.
    """
    name, accumulate = getattr(rule, "name", ""), plan.config.data_types.grad_accum_dtype
    require_whole(plan, rule, name)
    if accumulate and plan.policy.accumulate != torch.float32:
        msg = f"optimizer {name} works on gradients in fp32, found data_types.grad_accum_dtype {accumulate}; remove it"
        raise ConfigError(msg)
    if isinstance(rule, Drifts):
        kinds = Exchange.CODED_GRADIENT, Exchange.NOTHING, Exchange.DRIFT
        last: int = rule.intervals.var_freeze_step  # type: ignore[attr-defined]
        return OneBitPlan(kinds, last, plan.placing.hops, True, len(rule.local_names), False)
    lends_units: bool = rule.wants_whole
    return OneBitPlan((Exchange.MOMENTUM,), rule.freeze_step, plan.placing.hops, False, 0, lends_units)
