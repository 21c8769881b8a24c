"""The training engine: forward, backward and step."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.device import Readback, start_reading
from mpispeed.base.errors import MpispeedError, UsageError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import move
from mpispeed.engine import deepspeed_getters
from mpispeed.engine.backward import Accumulation, backward_scaled, divided, require_scalar, scale_loss
from mpispeed.engine.deepspeed_calls import DeepSpeedCalls
from mpispeed.engine.direct import DirectBackward, DirectPass
from mpispeed.engine.preemption import EndsInTime
from mpispeed.engine.settings import Settings
from mpispeed.engine.state.api import Checkpoints
from mpispeed.engine.state.offload_states import Absence, OffloadStates
from mpispeed.engine.state.weights import Weights
from mpispeed.engine.step import StepContext, with_scheduler
from mpispeed.nn.sync_norm import release_norms
from mpispeed.precision.cast import cast_inputs, naming_dtype
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.build.parts import Optimization, Parts
    from mpispeed.mesh.mesh import Mesh


class Engine(DirectBackward, Settings, DeepSpeedCalls, Weights, OffloadStates, Checkpoints, EndsInTime, nn.Module):
    """Trains a model under a plan. Built by `mpispeed.initialize`; the model itself is `engine.module`.

    Other names are looked up among the settings (`engine.gradient_clipping()`) and then on the model.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.module
        self.parts = parts
        self.plan = parts.plan
        self._accumulation = Accumulation(parts.plan.batch.gradient_accumulation_steps)
        self._direct = DirectPass()
        self._was_step_applied = False
        self._norm: float | None = None
        self._losses: list[float | Readback] = []  # of this batch
        self._step_start = time.perf_counter()
        self._is_closed = False
        self._absence: Absence | None = None
        self._tried_roots: set[str] = set()
        self.client_state: dict[str, Any] = {}
        if parts.optimization is not None:
            parts.optimization.link.attach(self._update_now)
        self._listen()

    # -- components ------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The ranks as named axes."""
        return self.parts.mesh

    @property
    def bus(self) -> Bus:
        """The event bus, to which observers subscribe."""
        return self.parts.bus

    @property
    def counters(self) -> Counters:
        """Counters: micro_steps, global_steps, global_samples, skipped_steps."""
        return self.parts.counters

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that `initialize` returned, or None."""
        return self.parts.optimization.facade if self.parts.optimization else None

    @property
    def lr_scheduler(self) -> Any | None:
        """The learning-rate scheduler, or None; another may be put in its place, which steps from then on."""
        return self.parts.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any | None) -> None:
        if self.parts.optimization is not None:
            self.parts.step_parts = with_scheduler(self.parts.step_parts, scheduler)
        self.parts.scheduler = scheduler

    @property
    def training_dataloader(self) -> Any | None:
        """The loader made from `training_data`, or None."""
        return self.parts.loader

    # -- one micro-batch ---------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; returns its output unchanged."""
        self._require("forward", (Kind.lp_params,))
        self._settle_direct()
        micro_step, global_step = self.counters.micro_steps, self.counters.global_steps
        self.bus.announce(Event.BATCH_START, micro_step=micro_step, global_step=global_step, is_training=self.training)
        if self.parts.features.changes_batches:
            inputs, kwargs = self.parts.features.batch((inputs, kwargs), is_training=self.training)
        if self.plan.device.type != "cpu":
            inputs, kwargs = move((inputs, kwargs), self.plan.device)
        if self.plan.casts_inputs:
            inputs = cast_inputs(inputs, self.plan.policy.compute)
        start = time.perf_counter()
        with self.parts.sharding.unwinding(), naming_dtype(self.plan.policy.compute, self.plan.cast_by):
            output = self.module(*inputs, **kwargs)
        self.bus.announce(Event.FORWARD_END, seconds=time.perf_counter() - start)
        return output

    def backward(
        self,
        loss: Any,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        """Compute gradients of `loss`; at an accumulation boundary their reduction over ranks starts.

        Returns the loss divided by the accumulation steps (not inside `no_sync`, where the caller scales).

        Args:
            loss: a scalar.
            allreduce_gradients: False leaves gradients local until `allreduce_gradients()` or `step()` at a boundary.
            release_loss: no effect: the engine keeps the value of the loss, not the tensor.
            retain_graph: keep the graph for another pass.
            scale_wrt_gas: divide the loss by the accumulation steps.

        Collective over: the data axis, at boundaries (every time where gradients are sharded).

        Raises:
            UsageError: there is no optimizer, the loss is not a scalar, or `allreduce_gradients` is False where
                gradients are sharded over ranks.
        """
        self._require("backward", (Kind.lp_params, Kind.lp_grads))
        grads, start = self._optimization("backward").grads, time.perf_counter()
        self._settle_direct()
        if not allreduce_gradients:
            self._require_whole_grads("engine.backward(allreduce_gradients=False)")
        divides = scale_wrt_gas and not self._accumulation.is_local
        steps = self.plan.batch.gradient_accumulation_steps if divides else 1
        loss = scale_loss(loss, steps)
        require_scalar(loss, "engine.backward", "sum or average it first")
        is_due = self.is_gradient_accumulation_boundary() and allreduce_gradients
        grads.begin_backward(reduces=is_due and not self._accumulation.is_local)
        named = naming_dtype(self.plan.policy.compute, self.plan.cast_by)
        with self.parts.sharding.unwinding(), divided(steps), named:
            backward_scaled(loss, self.parts.scaler.scale, retain_graph=retain_graph)
        self.parts.end_backward()
        self._losses.append(start_reading(loss))
        self.bus.announce(Event.BACKWARD_END, seconds=time.perf_counter() - start)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at a boundary reduce, clip, update and advance the schedule.

        Gradients that backward has not reduced, because the boundary was not known then, are reduced here.

        Collective over: the data axis, at boundaries; all ranks, where `walltime.save_dir` is set.

        Raises:
            UsageError: inside `no_sync`, there is no optimizer, or (then on every rank) no rank has run a backward pass
                before an update.
            RunEnded: (a SystemExit) on all ranks: the run was saved because its job ends or it was asked to stop.
        """
        self._optimization("step")
        self._require("step")
        if self._accumulation.is_local:
            msg = "engine.step() inside no_sync would update from unsummed gradients; leave the context first"
            raise UsageError(msg)
        self._settle_direct()
        self._was_step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._accumulation.warn_of_fewer(self.counters.pending_backwards, self.counters.finished_micro_steps)
            self._run_step(lr_kwargs or {})
        self.counters.micro_steps += 1
        self._end_step()

    def _update_now(self) -> None:
        """`step` at a boundary, wherever the micro-batches are; `optimizer.step()` calls it."""
        accumulation = self._accumulation
        before, accumulation.override = accumulation.override, True
        try:
            self.step()
        finally:
            accumulation.override = before

    def _run_step(self, lr_kwargs: dict[str, Any]) -> None:
        counters = self.counters
        samples, lr, start = self.plan.batch.train_batch_size, self.get_lr(), time.perf_counter()
        ctx = StepContext(counters.update_count + 1, self.parts.scaler.scale, samples, lr_kwargs)
        for part in self.parts.step_parts:
            part(ctx)
        self.parts.buffers.equalise()
        self._was_step_applied = not ctx.skip
        counters.end_batch(samples, is_skipped=ctx.skip)
        self._norm = self._norm if ctx.skip else ctx.norm
        now = time.perf_counter()
        self.bus.announce(
            Event.STEP_END,
            global_step=counters.global_steps,
            samples=counters.global_samples,
            loss=sum(map(float, self._losses)) if self._losses else None,  # the loss of a direct pass is unknown
            lr=lr[0] if lr else 0.0,
            norm=ctx.norm,
            loss_scale=ctx.scale,
            skipped=ctx.skip,
            seconds=now - self._step_start,
            update_seconds=now - start,
        )
        self._step_start, self._losses = now, []
        self.parts.expect_step()

    def train_batch(self, data_iter: Iterator[Any], loss_fn: Callable[..., torch.Tensor] | None = None) -> float:
        """Run all micro-batches of one global batch and the step; returns this rank's mean loss.

        Args:
            data_iter: yields the model's arguments as a tuple, or one tensor.
            loss_fn: computes the loss from the model's output and the batch; without it the output is the loss.

        Collective over: the data axis.
        """
        losses: list[float | Readback] = []
        for _ in range(self.plan.batch.gradient_accumulation_steps):
            batch = next(data_iter)
            if self.plan.device.type != "cpu":
                batch = move(batch, self.plan.device)
            arguments = batch if isinstance(batch, tuple | list) else (batch,)
            output = self(*arguments)
            losses.append(start_reading(self.backward(output if loss_fn is None else loss_fn(output, batch))))
            self.step()
        return sum(map(float, losses))

    # -- accumulation ------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True from forward to step of the last micro-batch of a global batch."""
        return self._accumulation.is_boundary(self.counters.finished_micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set the boundary by hand; None returns to counting micro-batches."""
        self._accumulation.override = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward adds gradients locally, without reductions; the caller scales the loss.

        Raises:
            UsageError: gradients are sharded over ranks, or the context is entered twice.
        """
        self._require_whole_grads("no_sync context manager")
        with self._accumulation.local():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none=set_to_none)
        if self.parts.optimization:
            self.parts.optimization.grads.clear()

    # -- other names ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found, value = deepspeed_getters.find(self.__dict__.get("parts"), name)
            return value if found else getattr(super().__getattr__("module"), name)

    def _optimization(self, verb: str) -> Optimization:
        if self._is_closed:
            msg = (
                f"engine.{verb}() after engine.destroy(), or after its model was given to another engine: its hooks "
                "and groups of ranks are gone; make a new engine"
            )
            raise UsageError(msg)
        if self.parts.optimization is None:
            msg = f'engine.{verb}() needs an optimizer: set "optimizer" in the config or pass one to initialize'
            raise UsageError(msg)
        return self.parts.optimization

    # -- end -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Remove hooks, stop communication threads, flush observers. The model keeps its weights.

        Waits for a checkpoint that is being written.

        Collective over: all ranks, the first time.

        Raises:
            StoreError: on every rank, if weights in swap files cannot be read; everything else is still done.
            CheckpointError: on every rank, if the checkpoint could not be written; everything else is still done.
        """
        if not self._is_closed:
            try:
                self.wait_checkpoint()
            finally:
                if self._pending is None:  # pending after an interrupt: the save goes on, and needs the mesh
                    self._is_closed = True
                    self._take_apart()
                    self._saver = None

    def _take_apart(self) -> None:
        if self.parts.optimization:
            self.parts.optimization.hooks.remove()
            self.parts.optimization.unguard()
        self.parts.sharding.meet("engine.destroy()")
        if not self.parts.params.away:
            self.parts.show(is_training=False)  # the model keeps the common parameters
        try:
            if self.parts.optimization:
                with suppress(MpispeedError):  # the channel may be broken already
                    self.parts.optimization.grads.pause()  # reductions under way use stores that are closed next
            self._end_absence()
            self.parts.sharding.remove()
        finally:
            release_norms(self.module)
            self.bus.announce(Event.CLOSE)
            self.mesh.close()
