"""The parts an engine holds, and the counters it keeps."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpispeed.zero.kinds import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn

    from mpispeed.base.events import Bus
    from mpispeed.engine.plan import Plan
    from mpispeed.engine.sharding import Sharding
    from mpispeed.engine.sharing import Sharing
    from mpispeed.engine.step import StepPart
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale
    from mpispeed.store.table import Table
    from mpispeed.zero.coded import CodedExchange
    from mpispeed.zero.grads import GradStore
    from mpispeed.zero.hooks import GradHooks
    from mpispeed.zero.params import ParamStore
    from mpispeed.zero.walk import StateStore


@dataclass(slots=True)
class Counters:
    """Progress of a run."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    boundary_micro_steps: int = 0  # micro_steps when the last global batch ended
    pending_backwards: int = 0  # backward passes since then: their gradients are in no parameter yet
    updates_before_state: int = 0  # updates made before the present optimizer state began at zero

    @property
    def update_count(self) -> int:
        """Updates that the optimizer state has seen."""
        return self.global_steps - self.skipped_steps - self.updates_before_state

    @property
    def finished_micro_steps(self) -> int:
        """Micro-batches of the current global batch whose step is done."""
        return self.micro_steps - self.boundary_micro_steps

    def end_batch(self, train_batch_size: int, *, is_skipped: bool) -> None:
        """Count one global batch."""
        self.skipped_steps += is_skipped
        self.global_steps += 1
        self.global_samples += train_batch_size
        self.boundary_micro_steps = self.micro_steps + 1
        self.pending_backwards = 0


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
    unguard: Callable[[], object] = field(default=lambda: None)  # gives a client's optimizer its own methods back
    coded: CodedExchange | None = None  # of a 1-bit optimizer


@dataclass(slots=True)
class Parts:
    """What `assemble` built for one engine."""

    plan: Plan
    mesh: Mesh
    module: nn.Module
    sharding: Sharding
    bus: Bus
    scaler: LossScale
    counters: Counters
    optimization: Optimization | None
    scheduler: Any | None
    loader: Any | None
    step_parts: Sequence[StepPart]
    sharing: Sharing

    @property
    def table(self) -> Table:
        """Which parameter is where."""
        return self.sharding.table

    @property
    def params(self) -> ParamStore:
        """What holds parameters and masters."""
        return self.sharding.params

    def expect_step(self) -> None:
        """Tell what takes gradients which update comes next; after counters were changed. Local."""
        self.params.is_apart = lambda: self.is_local
        if self.optimization is not None and self.optimization.coded is not None:
            self.optimization.coded.begin(self.counters.update_count + 1)

    @property
    def is_apart(self) -> bool:
        """True if parameters of data ranks differ, because a 1-bit optimizer makes local updates."""
        coded = self.optimization.coded if self.optimization else None
        return coded is not None and coded.is_apart(self.counters.update_count)

    @property
    def is_local(self) -> bool:
        """True if the model has this rank's own parameters now, which others do not have."""
        coded = self.optimization.coded if self.optimization else None
        return coded is not None and self.is_apart and not coded.shows_common

    def show(self, *, is_training: bool, is_refreshed: bool = False) -> None:
        """Where data ranks are apart, give the model its local parameters to train, else the common ones. Local.

        Args:
            is_training: which.
            is_refreshed: parameters were just made of masters.

        Raises:
            UsageError: states are away that this needs.
        """
        coded = self.optimization.coded if self.optimization else None
        if coded is None or not self.is_apart:
            return
        coded.shows_common = coded.shows_common or is_refreshed
        if coded.shows_common == is_training:
            kinds = (Kind.hp_params, Kind.lp_params, Kind.optim_states)
            self.params.require(kinds, "engine.train() or eval() between meetings of a 1-bit optimizer")
            if is_training:
                coded.show_local()
            else:
                coded.show_common()

    @contextmanager
    def common(self) -> Iterator[None]:
        """The time in which the model has parameters that are equal on all data ranks."""
        coded = self.optimization.coded if self.optimization else None
        if coded is None or coded.shows_common or not self.is_apart:
            yield
            return
        self.show(is_training=False)
        try:
            yield
        finally:
            self.show(is_training=True)

    def end_backward(self) -> None:
        """A backward pass is over. Collective over: the data axis, where gradients or parameters rest cut."""
        if self.optimization is not None:
            self.optimization.grads.end_backward()
        self.sharding.end_backward()
