"""The components an engine holds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpispeed.engine.buffers import Buffers
from mpispeed.monitor.by_hand import Monitors, Throughput
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn

    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.plan.plan import Plan
    from mpispeed.engine.build.stores import Sharding
    from mpispeed.engine.facade import StepLink
    from mpispeed.engine.replica_groups import Sharing
    from mpispeed.engine.step import StepPart
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.onebit_exchange import OneBitExchange
    from mpispeed.sharding.grads import GradHooks, GradStore
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import ZeroState
    from mpispeed.sharding.update_windows import StateStore
    from mpispeed.store.table import Table


@dataclass(frozen=True, slots=True)
class Optimization:
    """Everything that exists only when there is an optimizer."""

    state: ZeroState
    hooks: GradHooks
    facade: torch.optim.Optimizer  # the optimizer that `initialize` returns
    basic: torch.optim.Optimizer  # the optimizer that schedulers attach to
    link: StepLink  # what `step()` of these calls
    unguard: Callable[[], object] = field(default=lambda: None)  # gives a client's optimizer its own methods back
    onebit: OneBitExchange | None = None  # of a 1-bit optimizer

    @property
    def rule(self) -> Rule:
        """The update rule."""
        return self.state.rule

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters of the parameter groups."""
        return self.state.groups

    @property
    def grads(self) -> GradStore:
        """The gradients."""
        return self.state.grads

    @property
    def states(self) -> StateStore:
        """The optimizer's slots."""
        return self.state.states


@dataclass(slots=True)
class Parts:
    """Components of one engine, as `assemble` built them."""

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
    is_compiled: bool = False  # by `engine.compile`
    monitors: Monitors = field(default_factory=Monitors)
    throughput: Throughput = field(default_factory=Throughput)
    buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        self.throughput.attach(self.bus)
        self.buffers = Buffers(self.module, self.mesh["data"])

    @property
    def table(self) -> Table:
        """Units and the places of parameters in them."""
        return self.sharding.table

    @property
    def params(self) -> ParamStore:
        """The store of parameters and masters."""
        return self.sharding.params

    def expect_step(self) -> None:
        """Prepare a 1-bit optimizer for the next update; called after the counters have changed. Local."""
        if self.optimization is not None and self.optimization.onebit is not None:
            self.optimization.onebit.begin(self.counters.update_count + 1)

    @property
    def is_apart(self) -> bool:
        """True if parameters differ between data ranks, because a 1-bit optimizer makes local updates."""
        onebit = self.optimization.onebit if self.optimization else None
        return onebit is not None and onebit.is_apart(self.counters.update_count)

    def show(self, *, is_training: bool, is_refreshed: bool = False) -> None:
        """Give the model its local parameters for training, or the common ones, where data ranks differ. Local.

        Args:
            is_training: show the local parameters; else the common ones.
            is_refreshed: parameters were just written from masters.

        Raises:
            UsageError: states that this needs are offloaded.
        """
        onebit = self.optimization.onebit if self.optimization else None
        if onebit is None or not self.is_apart:
            return
        onebit.shows_common = onebit.shows_common or is_refreshed
        if onebit.shows_common == is_training:
            kinds = (Kind.hp_params, Kind.lp_params, Kind.optim_states)
            self.params.require(kinds, "engine.train() or eval() between meetings of a 1-bit optimizer")
            if is_training:
                onebit.show_local()
            else:
                onebit.show_common()

    @contextmanager
    def common(self) -> Iterator[None]:
        """Context in which the model holds parameters that are equal on all data ranks."""
        onebit = self.optimization.onebit if self.optimization else None
        if onebit is None or onebit.shows_common or not self.is_apart:
            yield
            return
        self.show(is_training=False)
        try:
            yield
        finally:
            self.show(is_training=True)

    def dismantle(self) -> None:
        """Give the model and the optimizer back, so that another `initialize` can take them. Local."""
        if self.optimization is not None:
            self.optimization.hooks.remove()
            self.optimization.unguard()
        self.sharding.remove()

    def end_backward(self) -> None:
        """End a backward pass. Collective over: the data axis, where gradients or parameters are sharded."""
        self.counters.pending_backwards += 1
        if self.optimization is not None:
            self.optimization.grads.end_backward()
        self.sharding.end_backward()
