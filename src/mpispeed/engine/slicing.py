"""Cuts the layers of a model over the model axis, before an engine takes the model over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import Comm
from mpispeed.nn import random
from mpispeed.nn.tensor import cuts, inject
from mpispeed.zero import guard

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.plan import Plan
    from mpispeed.mesh.mesh import Mesh

log = logging.getLogger(__name__)

_TABLE = (
    "tensor_parallel.injection_policy_tuple is {0!r}: names of layers alone do not say how the others are cut; give a "
    'table, such as {{"attention.query": "column", "attention.output": "row"}}, or remove the key'
)


def slice_layers(plan: Plan, mesh: Mesh, model: nn.Module) -> None:
    """Replace layers by slices of them, unless the model has cut layers of its own.

    A stage of a pipeline on which nothing can be cut stays whole, if there is another one where something can.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if no layer of the model can be cut, or layers are cut otherwise already.
    """
    comm, pipe = mesh["model"], mesh["pipe"]
    problem = _find_other_group(model, comm) or _find_sealed(model, comm)
    mesh.world.comm.agree(not problem, problem, ConfigError)
    if comm.size == 1:
        return
    tracker = random.get_rng_tracker()
    if random.MODEL_PARALLEL not in tracker.get_states():  # the default stream stays as the script has seeded it
        tracker.add(random.MODEL_PARALLEL, plan.config.seed + random.SLICE_OFFSET + comm.rank)
    section = plan.config.tensor_parallel
    if not cuts(model):
        try:
            report = inject(
                model,
                comm.duplicate(),  # the layers outlive the engine, and its groups
                _table(section.injection_policy_tuple),
                vocab=section.vocab_parallel,
                sequence_parallel=section.sequence_parallel,
                grain=section.tensor_parallel.tp_grain_size,
            )
            log.info("%s", report) if mesh.rank == 0 else log.debug("%s", report)
        except ConfigError as error:
            problem = str(error)
    problems = pipe.gather_objects(problem)
    if all(problems):
        raise ConfigError(problems[0])
    if mesh.rank == 0:
        for stage, text in enumerate(problems):
            if text:
                log.info("stage %d has no slices: %s", stage, text)


def _find_other_group(model: nn.Module, comm: Comm) -> str:
    """A sentence if a layer is cut over other ranks than those of `comm`, else ""."""
    whole = cuts(model)
    for path, module in model.named_modules() if whole else ():
        group = vars(module).get("comm")
        if isinstance(group, Comm) and list(group.ranks) != list(comm.ranks):
            return (
                f"layer {path} is cut over the {group.size} ranks {list(group.ranks)[:8]}, and the engine would have "
                f"slices on {list(comm.ranks)[:8]}; set tensor_parallel.autotp_size to {group.size} (or give the mpu "
                "of the layers), or build the model anew"
            )
    return ""


def _find_sealed(model: nn.Module, comm: Comm) -> str:
    """A sentence if layers are to be cut whose parameters `zero.Init` has cut already, else ""."""
    sealed = [name for name, param in model.named_parameters() if guard.is_sealed(param)] if comm.size > 1 else []
    if not sealed or cuts(model):
        return ""
    return (
        f"tensor_parallel cuts whole layers, and {sealed[0]} was cut over data ranks by zero.Init already; build the "
        "model outside of zero.Init, or leave tensor_parallel out"
    )


def _table(policy: Any) -> Mapping[str, str] | None:
    if isinstance(policy, Mapping | None):
        return policy
    raise ConfigError(_TABLE.format(policy))
