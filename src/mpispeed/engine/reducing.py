"""Which way of summing gradients the settings ask for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpispeed.base import log as logs
from mpispeed.mesh.codec import Feedback
from mpispeed.zero.grads import PARTIAL_AXES
from mpispeed.zero.reducers import PlainReducer, QuantizedReducer
from mpispeed.zero.sparse import RowReducer, find_sparse_tables

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.plan import Plan
    from mpispeed.store.table import Table
    from mpispeed.zero.reducers import Reducer

log = logging.getLogger(__name__)


def choose_reducer(plan: Plan, model: nn.Module, table: Table) -> Reducer | None:
    """The reducer for `sparse_gradients` or `zero_quantized_gradients`; None: plain sums."""
    if plan.config.sparse_gradients and plan.states.master.is_whole:
        chosen = find_sparse_tables(model)
        names = {place.entry.name for param, place in table.places() if id(param) in chosen}
        if names:
            return RowReducer(PARTIAL_AXES, names)
        text = "sparse_gradients has no effect: no nn.Embedding or nn.EmbeddingBag that is trained has sparse=True"
        logs.once(log, logging.WARNING, text)
        return None
    zero = plan.config.zero_optimization
    if not zero.zero_quantized_gradients:
        return None
    if plan.placing.hops is None:
        text = (
            "zero_optimization.zero_quantized_gradients has no effect on one node: sums inside a node are not "
            "quantized (environment variable MPISPEED_RANKS_PER_NODE says how many ranks form a node)"
        )
        logs.once(log, logging.WARNING, text)
        return None
    loco = zero.zeropp_loco_param
    inner, outer = plan.placing.hops
    plain = PlainReducer(PARTIAL_AXES, plan.states.master)
    return QuantizedReducer(
        inner, outer, plain, feedback=None if loco is None else lambda: Feedback(loco.err_beta, loco.reset_T)
    )
