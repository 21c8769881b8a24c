"""Refusal of plans that shard what an optimizer with local gradients needs in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.optim.exchange import Drifts, Exchanges

if TYPE_CHECKING:
    from mpispeed.plan.plan import Plan


def require_whole(plan: Plan, rule: Any, name: str) -> None:
    """Require replicated gradients for rules that leave them local, and masters for rules with local updates.

    In a pipeline gradients are replicated at every ZeRO stage.

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
