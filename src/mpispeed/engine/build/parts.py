"""The components an engine holds."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.base.passes import Pass, Passes
from mpispeed.engine.attached import Attached
from mpispeed.engine.hooks import Given
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from mpispeed.base.clock import Clock
    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Accumulation, Counters
    from mpispeed.engine.buffers import Buffers
    from mpispeed.engine.facade import StepLink
    from mpispeed.engine.replica_groups import Sharing
    from mpispeed.engine.slot_streams import SlotStreams
    from mpispeed.engine.updates import Updates
    from mpispeed.exchange.strategy import ExchangeStrategy
    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.mesh.deadlock import Watch
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.plan.plan import Batch, Plan
    from mpispeed.precision.cast import Casting
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.grads import GradHooks, GradStore
    from mpispeed.sharding.module_hooks import ModuleHooks
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import StateStore, ZeroState
    from mpispeed.sharding.use_order import Order
    from mpispeed.store.layout import Table

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OrderWatch:
    """Warns when units are used in another order than in the pass before."""

    order: Order
    seen: int = 0

    def look(self) -> None:
        """Warn of deviations since the last call; called once in a pass."""
        new, self.seen = self.order.deviations - self.seen, self.order.deviations
        if new:
            log.warning(
                "%d times in the last pass parameters were used in another order than in the pass before; what comes "
                "after such a place is fetched ahead only from where the known order goes on", new,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sharding:
    """A model's parameters under an engine; `module_hooks` is None where no parameter is sharded."""

    table: Table
    params: ParamStore
    module_hooks: ModuleHooks | None
    watch: OrderWatch | None = None
    waits: Watch | None = None
    wait: Wait | None = None  # waits for started reductions

    def unwinding(self) -> AbstractContextManager[None]:
        """Context of a call into the model; if an exception ends it, no unit stays in use."""
        return nullcontext() if self.module_hooks is None else self.module_hooks.unwinding()

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Context in which parts of the model are run separately."""
        with self.unwinding(), nullcontext() if self.module_hooks is None else self.module_hooks.running(model):
            yield

    def end_backward(self) -> None:
        """End a backward pass."""
        if self.module_hooks is not None:
            self.module_hooks.end_backward()
        if self.watch is not None:
            self.watch.look()

    def meet(self, call: str) -> None:
        """Wait until all ranks have made the same call; a rank that waits for something else is reported.

        Collective over: the data axis.

        Raises:
            AgreementError: on every rank, if ranks made different calls, or wait for each other.
        """
        data = self.params.mesh["data"]
        if self.waits is None or data.size == 1:
            return
        channel = self.params.mesh.channel("calls")
        work = channel["data"].start(lambda _: None, "call", label=call, describe=lambda: f"all ranks to call {call}")
        self.waits.wait(work, lambda: f"all ranks to call {call}")

    def remove(self) -> None:
        """Remove hooks and give the model its parameters back unsharded.

        Collective over: the data axis.

        Raises:
            StoreError: on every rank, if swapped parameters of one cannot be read; everything else is still done.
        """
        if self.module_hooks is not None:
            self.module_hooks.remove()
        try:
            self.params.give_back()
        finally:
            if self.waits is not None:
                self.waits.close()


@dataclass(frozen=True, slots=True)
class Optimization:
    """Everything that exists only when there is an optimizer."""

    state: ZeroState
    hooks: GradHooks
    facade: torch.optim.Optimizer  # the optimizer that `initialize` returns
    basic: torch.optim.Optimizer  # the optimizer that schedulers attach to
    link: StepLink  # what `step()` of these calls
    exchange: ExchangeStrategy  # how data-parallel ranks come to one update
    unguard: Callable[[], object] = field(default=lambda: None)  # gives a client's optimizer its own methods back

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
    """Components of one engine, as `assemble` built them.

    Attributes:
        given: what the script gave to `initialize`.
        sharing: None where no parameter is shared along the pipe or the model axis.
        buffers: None without persistent buffers, and where one rank has all data.
        clock: times passes and steps.
        passes: which forward pass runs.
        is_training: the mode that `engine.train` has set.
        is_closed: `engine.destroy` was called.
    """

    plan: Plan
    mesh: Mesh
    module: nn.Module
    sharding: Sharding
    bus: Bus
    scaler: LossScale
    counters: Counters
    casting: Casting
    optimization: Optimization | None
    accumulation: Accumulation
    updates: Updates
    scheduler: Any | None
    given: Given
    sharing: Sharing | None
    buffers: Buffers | None
    clock: Clock
    is_training: bool = True
    is_closed: bool = False
    is_compiled: bool = False  # by `engine.compile`
    features: Attached = field(default_factory=Attached)
    passes: Passes = field(default_factory=Passes)
    streams: SlotStreams | None = None  # random numbers of slots, where a micro-batch does not depend on its rank

    @property
    def table(self) -> Table:
        """Units and the places of parameters in them."""
        return self.sharding.table

    @property
    def params(self) -> ParamStore:
        """The store of parameters and masters."""
        return self.sharding.params

    # -- what calls of the engine need -------------------------------------------------------------------------------

    def trained(self, verb: str) -> Optimization:
        """What trains the model, for `engine.<verb>()`.

        Raises:
            UsageError: the engine is closed, or has no optimizer.
        """
        if self.is_closed:
            msg = (
                f"engine.{verb}() after engine.destroy(), or after its model was given to another engine: its hooks "
                "and groups of ranks are gone; make a new engine"
            )
            raise UsageError(msg)
        if self.optimization is None:
            msg = f'engine.{verb}() needs an optimizer: set "optimizer" in the config or pass one to initialize'
            raise UsageError(msg)
        return self.optimization

    def require(self, verb: str, kinds: Collection[str] = tuple(Kind)) -> None:
        """Require states of these kinds in memory, for `engine.<verb>()`.

        Raises:
            UsageError: `engine.offload_states` took some of them away.
        """
        params = self.sharding.params
        if params.away:
            params.require(kinds, f"engine.{verb}()")

    def require_whole_grads(self, what: str) -> None:
        """Require gradients that a rank can keep to itself.

        Raises:
            UsageError: gradients are sharded over ranks.
        """
        if self.accumulation.is_undivided:
            msg = (
                f'{what} does not work with reduction "invariant": each backward pass is one micro-batch of '
                "train_batch_size, whose gradient is summed with those of all others; leave it out: sums wait for the "
                "last micro-batch anyway"
            )
            raise UsageError(msg)
        if self.optimization and self.table.shards_grads:
            msg = (
                f"{what} is incompatible with gradients that are partitioned over ranks "
                f"(zero_optimization.stage {self.plan.stage}); use stage 0 or 1, or gradient_accumulation_steps"
            )
            raise UsageError(msg)

    # -- settings that change ----------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps only.

        Raises:
            ConfigError: it is not a multiple of micro-batch size times data-parallel ranks.
        """
        self._set_batch(self.plan.batch.with_train_batch_size(train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size and with it the global batch; the accumulation steps stay.

        For the caller's own loaders: `training_dataloader` keeps the micro-batch size it was made with.
        """
        self._set_batch(self.plan.batch.with_micro_batch_size(micro_batch_size))

    def _set_batch(self, batch: Batch) -> None:
        if self.plan.slots is not None and self.plan.with_batch(batch).slots != self.plan.slots:
            msg = (
                f'reduction "invariant": another number of micro-batches of a step ({batch.triple} for (train_batch_'
                f"size, micro-batch size, accumulation steps), instead of {self.plan.batch.triple}) is another run; "
                "set train_batch_size in the config"
            )
            raise ConfigError(msg)
        self.plan = self.plan.with_batch(batch)
        self.accumulation.steps = batch.gradient_accumulation_steps

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        **more: Any,
    ) -> None:
        """Let torch compile the model: `engine.module.compile(backend=backend, **compile_kwargs)`.

        Args:
            backend: of `torch.compile`.
            compile_kwargs: other arguments of `torch.compile`.
            schedule: must be None: passes of DeepSpeed's own compiler.
            more: as `compile_kwargs`.

        Raises:
            UsageError: a schedule is given.
        """
        if schedule is not None:
            msg = "engine.compile(schedule=...): passes of DeepSpeed's own compiler are not available; leave it out"
            raise UsageError(msg)
        self.module.compile(backend=backend, **{**(compile_kwargs or {}), **more})
        self.is_compiled = True

    # -- passes and updates ---------------------------------------------------------------------------------

    def begin_forward(self, micro_step: int, *, is_training: bool, chunk: int = 0) -> None:
        """Begin a forward pass of the micro-batch of that number in its global batch, of a pipeline's chunk. Local."""
        counted, step = self.counters.micro_steps, self.counters.global_steps
        self.bus.announce(Event.BATCH_START, micro_step=counted, global_step=step, is_training=is_training)
        streams, slot = self.streams, None
        if streams is not None:
            if is_training:
                slot = streams.begin(step, micro_step, chunk)
            else:
                streams.leave()  # that of a pass which has failed, or has no backward
        self.passes.begin(Pass(step, micro_step, is_training, slot))

    def in_forward(self) -> AbstractContextManager[None]:
        """Context of a call into the model, after `begin_forward`; refuses what may not be in a slot."""
        return nullcontext() if self.streams is None else self.streams.inside()

    def expect_step(self) -> None:
        """Prepare the exchange for the next update; called after the counters have changed. Local."""
        if self.optimization is not None and self.optimization.exchange.is_phased:
            self.optimization.exchange.begin(self.counters.update_count + 1)

    def end_backward(self) -> None:
        """End a backward pass. Collective over: the data axis, where gradients or parameters are sharded."""
        self.counters.pending_backwards += 1
        if self.streams is not None:
            self.streams.leave()
        if self.optimization is not None:
            self.optimization.grads.end_backward()
        self.sharding.end_backward()

    def show_loaded(self) -> None:
        """Give the model what the engine's mode needs, after parameters were written from masters. Local."""
        if self.optimization is not None:
            self.optimization.exchange.show(is_training=self.is_training, is_refreshed=True)

    def dismantle(self) -> None:
        """Give the model and the optimizer back, so that another `initialize` can take them, and close all else.

        Collective over: all ranks.
        """
        if self.optimization is not None:
            self.optimization.hooks.remove()
            self.optimization.unguard()
        try:
            self.sharding.remove()
        finally:
            self.bus.announce(Event.CLOSE)
            self.mesh.close()
