"""The row of 1-bit exchanges in `exchange.table`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.exchange.onebit.cost import OneBitCost
from mpispeed.exchange.onebit.exchange import OneBitExchange
from mpispeed.exchange.onebit.plan import onebit_plan_of
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    from mpispeed.exchange.making import Making
    from mpispeed.plan.plan import Plan


def make(making: Making) -> OneBitExchange:
    """The exchange of a 1-bit optimizer.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if the dtypes or masks of one do not allow it.
    """
    plan, mesh, params = making.plan, making.mesh, making.params
    # A disk that fails under one rank is told to the others on the way, which the channel's thread cannot do. Nor does
    # it code what would have to go to the host first and come back.
    is_apart = plan.device.type != "cpu" and plan.states.master.tier is not Tier.DEVICE
    is_beside = making.channel.is_overlapped and not making.may_swap and not is_apart
    is_scaled = plan.gradient_clipping != 0 or plan.mixed.is_scaled
    channel = mesh.channel("grads") if is_beside and not is_scaled else None
    with mesh.world.comm.together(ConfigError):
        return OneBitExchange(
            mesh, params, making.grads, making.sums, making.states, making.rule, making.groups, making.update_windows,
            plan.placing.hops, channel,
        )  # fmt: skip


def cost(plan: Plan, rule: Any) -> OneBitCost:
    """Memory and traffic of the exchange.

    Raises:
        ConfigError: gradients would be sharded or not in fp32, or masters of local updates would be sharded.
    """
    return OneBitCost(onebit_plan_of(plan, rule))
