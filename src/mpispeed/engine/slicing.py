"""Cuts the layers of a model over the model axis, before an engine takes the model over."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpispeed.engine.sharing import broadcast
from mpispeed.nn import random
from mpispeed.nn.tensor import cuts

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.plan import Plan
    from mpispeed.mesh.mesh import Mesh

log = logging.getLogger(__name__)


def slice_layers(plan: Plan, mesh: Mesh, model: nn.Module) -> None:
    """Replace layers by slices of them where the config asks for it and the model has none of its own.

    All slices are cut from the weights of the first rank of the slicing group.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank of the group, if no layer of the model can be cut.
    """
    comm = mesh["model"]
    if comm.size == 1:
        return
    tracker = random.get_rng_tracker()
    if random.MODEL_PARALLEL not in tracker.get_states():  # the default stream stays as the script has seeded it
        tracker.add(random.MODEL_PARALLEL, plan.config.seed + random.SLICE_OFFSET + comm.rank)
    if cuts(model):
        return
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(comm, tensor)
    from mpispeed.nn.tensor.inject import inject

    report = inject(model, comm, plan.config.tensor_parallel.injection_policy_tuple)
    if mesh.rank == 0:
        log.info("%s", report)
