"""The parts an engine holds, and the counters it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from mpispeed.base.events import Bus
    from mpispeed.engine.plan import Plan
    from mpispeed.engine.step import StepPart
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale
    from mpispeed.store.table import Table
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.hooks import GradHooks
    from mpispeed.zero.params import ParamStore
    from mpispeed.zero.walk import StateStore


@dataclass(slots=True)
class Counters:
    """Progress of a run. `update_count` is the number of optimizer updates that were applied."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    @property
    def update_count(self) -> int:
        """Boundary steps that changed parameters."""
        return self.global_steps - self.skipped_steps


@dataclass(slots=True)
class Optimization:
    """Everything that exists only when there is an optimizer."""

    rule: Rule
    groups: list[dict[str, Any]]
    grads: GradStore
    states: StateStore
    hooks: GradHooks
    facade: torch.optim.Optimizer  # what `initialize` returns as the optimizer
    basic: torch.optim.Optimizer  # what schedulers attach to


@dataclass(slots=True)
class Parts:
    """What `assemble` built for one engine."""

    plan: Plan
    mesh: Mesh
    module: nn.Module
    table: Table
    params: ParamStore
    bus: Bus
    scaler: LossScale
    counters: Counters
    optimization: Optimization | None
    scheduler: Any | None
    loader: Any | None
    step_parts: Sequence[StepPart]
