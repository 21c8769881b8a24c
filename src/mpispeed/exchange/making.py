"""Components that strategies are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.reducers import SumChannel, SumGradients
    from mpispeed.sharding.update_windows import StateStore, UpdateWindows


@dataclass(frozen=True, slots=True)
class Making:
    """The components of a run that an exchange works on.

    Attributes:
        plan: the plan.
        mesh: the ranks.
        params: parameters and masters.
        grads: accumulators of gradients.
        sums: their sums in full precision, or of quantized messages.
        channel: time and place of sums.
        states: slots of the optimizer.
        rule: the update rule.
        groups: hyper-parameters of the parameter groups.
        update_windows: gives the rule its windows.
        may_swap: states of some rank may be in swap files.
    """

    plan: Plan
    mesh: Mesh
    params: ParamStore
    grads: GradShards
    sums: SumGradients
    channel: SumChannel
    states: StateStore
    rule: Rule
    groups: list[dict[str, Any]]
    update_windows: UpdateWindows
    may_swap: bool
