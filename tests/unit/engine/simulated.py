"""Engines on simulated ranks: the same parts, put on a world of threads."""

from typing import Any

import torch
from torch import nn

from mpispeed.config.load import validate
from mpispeed.engine.build.assemble import assemble
from mpispeed.engine.engine import Engine
from mpispeed.engine.hooks import Given, Setup
from mpispeed.mesh.mesh import Mesh
from mpispeed.plan.placements import ranks_per_node
from mpispeed.plan.plan import make_plan


def engine_on(world: Any, config: dict[str, Any], model: nn.Module, **more: Any) -> Engine:
    """What `initialize` does after it has joined MPI and read the config."""
    loaded = validate(config, "test")
    plan = make_plan(loaded.config, world.size, torch.float32, ranks_per_node=ranks_per_node(world))
    setup = Setup(None, plan, Mesh(plan.topology(), world, reduction=plan.reduction), Given(warnings=loaded.warnings))
    return Engine(assemble(setup, model, **more))
