"""What `reduction` "invariant" cannot do with a model, or with an optimizer that a script brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.optim.exchange import Exchanges
from mpispeed.optim.rule import Layerwise
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.plan.plan import Plan

_ORDERED = 'or set reduction to "ordered"'


def check_slots(plan: Plan, rule: Any, model: nn.Module) -> None:
    """Refuse models and update rules whose bits would depend on the ranks. Local, the same on all ranks.

    Raises:
        ConfigError: a stage has several chunks, ranks compress what they have, norms are added up from parts of ranks,
            or the ranks do not divide the micro-batches.
    """
    if plan.slots is None:
        return
    problem = ""
    if isinstance(model, PipelineModule) and model.num_chunks > 1:
        problem = f"a pipeline of {model.num_chunks} chunks per stage has gradients of several micro-batches at once; "
        problem += "use num_chunks=1"
    elif isinstance(rule, Exchanges):
        problem = f"with optimizer {rule.name} each rank compresses what it has; use AdamW"  # type: ignore[attr-defined]
    elif isinstance(rule, Layerwise) and not plan.states.master.is_replicated:
        problem = f"optimizer {rule.name} adds norms of parameters up from the parts of ranks; "  # type: ignore[attr-defined]
        problem += "set zero_optimization.stage to 0, use AdamW"
    if problem:
        msg = f'reduction "invariant": {problem}, {_ORDERED}'
        raise ConfigError(msg)
