"""The conditions of `Updates.leads`: steps of a run may end before the device has told how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.optim.rule import TakesFactor
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.build.parts import Optimization
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.params import ParamStore


def is_kept(
    plan: Plan, mesh: Mesh, model: nn.Module, params: ParamStore, scaler: LossScale, optimization: Optimization
) -> bool:
    """True if nothing of a step but the host's records needs the norm of its gradients on the host.

    All states are on the device, groups of ranks keep the lead of the host, the rule takes its factor from the device,
    and neither a loss scale nor an exchange of gradients follows overflows. Ranks agree, because a way of a group may
    be open on one node and not on another, and steps that lead send other messages.

    Collective over: all ranks.
    """
    exchange, rule = optimization.exchange, optimization.rule
    if plan.device.type in ("cpu", "meta"):
        return False
    keeps_lead = (
        not params.tiers.is_swapping
        and not params.tiers.keeps_on_host
        and all(comm.keeps_lead(plan.device) for _, comm in mesh.groups())
        and isinstance(rule, TakesFactor)
        and rule.takes_factor
        and not scaler.dynamic
        and not exchange.is_phased
        and not optimization.grads.exchange.local_grads
        and not isinstance(model, PipelineModule)
    )
    return all(mesh[mesh.topology.names].gather_objects(keeps_lead))
