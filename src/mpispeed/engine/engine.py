"""The training engine: forward, backward and step."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from mpispeed.base.device import start_reading
from mpispeed.base.errors import MpispeedError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import move
from mpispeed.engine import delegation
from mpispeed.engine.backward import Accumulation, DirectBackward, backward_scaled, divided, require_scalar, scale_loss
from mpispeed.engine.build.loaders import Loaders
from mpispeed.engine.build.parts import Parts
from mpispeed.engine.composition import compose
from mpispeed.engine.getters import Getters
from mpispeed.engine.state.checkpoints import Checkpoints
from mpispeed.engine.state.offload_states import OffloadStates
from mpispeed.engine.state.weights import Weights
from mpispeed.nn.sync_norm import release_norms
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Concatenate

    from typing_extensions import Self

    from mpispeed.base.device import Readback


def _delegated(name: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method of that name of the engine's object `name`, with its signature and text."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(getattr(self, name), method.__name__)(*args, **kwargs)
        return result

    call.__qualname__, call.__module__ = f"Engine.{method.__name__}", __name__
    return call


class Engine(Getters):
    """Trains a model under a plan. Built by `mpispeed.initialize`; the model itself is `engine.module`.

    Other names are looked up on the model. DeepSpeed's getters are in `engine/delegation.py`.

    Attributes:
        module: the model.
        parts: the components that the engine and its objects work on.
        accumulation: the boundaries of global batches.
        direct: backward passes that scripts start themselves.
        updates: the updates.
        checkpoints: saving and loading of whole runs.
        weights: the model's weights as state dicts.
        offload: states that leave memory on request.
        loaders: the loader of the training data, and more of its kind.
        run_end: what saves and ends the run in time, or None.
    """

    def __init__(self, parts: Parts) -> None:
        """Collective over: all ranks."""
        super().__init__()
        made = compose(parts)
        self.module, self.parts = parts.module, parts
        self.accumulation, self.direct, self.updates = made.accumulation, made.direct, made.updates
        self.checkpoints, self.weights, self.offload = made.checkpoints, made.weights, made.offload
        self.loaders, self.run_end = made.loaders, made.run_end
        if parts.optimization is not None:
            parts.optimization.link.attach(self._update_now)

    # -- components ------------------------------------------------------------------------------------------

    @property
    def lr_scheduler(self) -> Any | None:
        """The learning-rate scheduler, or None; another may be put in its place, which steps from then on."""
        return self.parts.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any | None) -> None:
        self.updates.follow(scheduler)
        self.parts.scheduler = scheduler

    # -- one micro-batch ---------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; returns its output unchanged."""
        parts = self.parts
        parts.require("forward", (Kind.lp_params,))
        self.direct.settle()
        micro_step, global_step = parts.counters.micro_steps, parts.counters.global_steps
        self.parts.bus.announce(
            Event.BATCH_START, micro_step=micro_step, global_step=global_step, is_training=self.training
        )
        if parts.features.batches:
            inputs, kwargs = parts.features.batch((inputs, kwargs), is_training=self.training)
        if parts.plan.device.type != "cpu":
            inputs, kwargs = move((inputs, kwargs), parts.plan.device)
        inputs = parts.casting.inputs(inputs)
        start = time.perf_counter()
        with parts.sharding.unwinding(), parts.casting.named():
            output = self.module(*inputs, **kwargs)
        self.parts.bus.announce(Event.FORWARD_END, seconds=time.perf_counter() - start)
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
        parts, is_local = self.parts, self.accumulation.is_local
        parts.require("backward", (Kind.lp_params, Kind.lp_grads))
        grads, start = parts.trained("backward").grads, time.perf_counter()
        self.direct.settle()
        if not allreduce_gradients:
            parts.require_whole_grads("engine.backward(allreduce_gradients=False)")
        steps = self.accumulation.steps if scale_wrt_gas and not is_local else 1
        loss = scale_loss(loss, steps)
        require_scalar(loss, "engine.backward", "sum or average it first")
        is_due = self.is_gradient_accumulation_boundary() and allreduce_gradients
        grads.begin_backward(reduces=is_due and not is_local)
        with parts.sharding.unwinding(), divided(steps), parts.casting.named():
            backward_scaled(loss, parts.scaler.scale, retain_graph=retain_graph)
        parts.end_backward()
        self.updates.losses.append(start_reading(loss))
        self.parts.bus.announce(Event.BACKWARD_END, seconds=time.perf_counter() - start)
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
        self.parts.trained("step")
        self.parts.require("step")
        self.accumulation.require_summed()
        self.direct.settle()
        self.updates.was_applied = False
        if self.is_gradient_accumulation_boundary():
            self.accumulation.warn_of_fewer()
            self.updates.run(self.parts.plan.batch.train_batch_size, lr_kwargs or {})
        self.parts.counters.micro_steps += 1
        if self.run_end is not None:
            self.run_end.end_step()

    def _update_now(self) -> None:
        """`step` at a boundary, wherever the micro-batches are; `optimizer.step()` calls it."""
        with self.accumulation.overridden(True):
            self.step()

    def train_batch(self, data_iter: Iterator[Any], loss_fn: Callable[..., torch.Tensor] | None = None) -> float:
        """Run all micro-batches of one global batch and the step; returns this rank's mean loss.

        Args:
            data_iter: yields the model's arguments as a tuple, or one tensor.
            loss_fn: computes the loss from the model's output and the batch; without it the output is the loss.

        Collective over: the data axis.
        """
        losses: list[float | Readback] = []
        for _ in range(self.accumulation.steps):
            batch = next(data_iter)
            if self.parts.plan.device.type != "cpu":
                batch = move(batch, self.parts.plan.device)
            arguments = batch if isinstance(batch, tuple | list) else (batch,)
            output = self(*arguments)
            losses.append(start_reading(self.backward(output if loss_fn is None else loss_fn(output, batch))))
            self.step()
        return sum(map(float, losses))

    # -- accumulation ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward adds gradients locally, without reductions; the caller scales the loss.

        Raises:
            UsageError: gradients are sharded over ranks, or the context is entered twice.
        """
        self.parts.require_whole_grads("no_sync context manager")
        with self.accumulation.local():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none=set_to_none)
        if self.parts.optimization:
            self.parts.optimization.grads.clear()

    # -- delegated -----------------------------------------------------------------------------------------------

    is_gradient_accumulation_boundary = _delegated("accumulation", Accumulation.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = _delegated("accumulation", Accumulation.set_gradient_accumulation_boundary)
    set_train_batch_size = _delegated("parts", Parts.set_train_batch_size)
    set_train_micro_batch_size = _delegated("parts", Parts.set_train_micro_batch_size)
    compile = _delegated("parts", Parts.compile)
    scale = _delegated("direct", DirectBackward.scale)
    allreduce_gradients = _delegated("direct", DirectBackward.allreduce_gradients)
    save_checkpoint = _delegated("checkpoints", Checkpoints.save_checkpoint)
    wait_checkpoint = _delegated("checkpoints", Checkpoints.wait_checkpoint)
    load_checkpoint = _delegated("checkpoints", Checkpoints.load_checkpoint)
    module_state_dict = _delegated("weights", Weights.module_state_dict)
    load_module_state_dict = _delegated("weights", Weights.load_module_state_dict)
    save_16bit_model = save_fp16_model = _delegated("weights", Weights.save_16bit_model)
    deepspeed_io = _delegated("loaders", Loaders.deepspeed_io)
    set_data_post_process_func = _delegated("loaders", Loaders.set_data_post_process_func)
    is_map_style_dataset = _delegated("loaders", Loaders.is_map_style_dataset)
    is_iterable_style_dataset = _delegated("loaders", Loaders.is_iterable_style_dataset)
    offload_states = _delegated("offload", OffloadStates.offload_states)
    reload_states = _delegated("offload", OffloadStates.reload_states)
    # Names that other libraries call.
    _backward_epilogue = _delegated("direct", DirectBackward.settle)
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict = module_state_dict

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written in the background or has not been waited for."""
        return self.checkpoints.is_saving

    @property
    def client_state(self) -> dict[str, Any]:
        """Goes into checkpoints that are made because the run ends, and comes back when it is resumed."""
        return self.checkpoints.client_state

    @client_state.setter
    def client_state(self, state: dict[str, Any]) -> None:
        self.checkpoints.client_state = state

    @property
    def must_stop(self) -> bool:
        """True once the run was saved because it has to end; for loops where `walltime.ends_program` is false."""
        return self.run_end is not None and self.run_end.must_stop

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint from which this run resumed by itself (its client state is in `client_state`), or None."""
        return None if self.run_end is None else self.run_end.resumed_from

    def heed_requests(self) -> None:
        """Save or end the run now, if requested; for long evaluations, called by all ranks alike.

        No effect within a global batch, or without `walltime.save_dir`. `engine.step` does the same at its end.

        Collective over: all ranks.

        Raises:
            RunEnded: the run is saved and has to end.
        """
        if self.run_end is not None:
            self.run_end.heed_between_steps()

    def _backward_prologue(self) -> None:
        """No operation: a pass begins with its first gradient. Scripts call this before `loss.backward()`."""

    # -- other names ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`. Local.

        Between synchronisations of local updates, data ranks train their own parameters and evaluate the common ones.

        Raises:
            UsageError: this has to switch between them, and states that it needs are offloaded.
        """
        super().train(mode)
        self.parts.is_training = mode
        if not self.parts.is_closed and self.parts.optimization:
            self.parts.optimization.exchange.show(is_training=mode)
        return self

    # -- end -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Remove hooks, stop communication threads, flush observers. The model keeps its weights.

        Waits for a checkpoint that is being written.

        Collective over: all ranks, the first time.

        Raises:
            StoreError: on every rank, if weights in swap files cannot be read; everything else is still done.
            CheckpointError: on every rank, if the checkpoint could not be written; everything else is still done.
        """
        if not self.parts.is_closed:
            try:
                self.wait_checkpoint()
            finally:
                if not self.is_saving:  # saving after an interrupt: the save goes on, and needs the mesh
                    self.parts.is_closed = True
                    self._take_apart()
                    self.checkpoints.close()

    def _take_apart(self) -> None:
        if self.parts.optimization:
            self.parts.optimization.hooks.remove()
            self.parts.optimization.unguard()
        self.parts.sharding.meet("engine.destroy()")
        if self.parts.optimization and not self.parts.params.away:
            self.parts.optimization.exchange.show(is_training=False)  # the model keeps the common parameters
        try:
            if self.parts.optimization:
                with suppress(MpispeedError):  # the channel may be broken already
                    self.parts.optimization.grads.pause()  # reductions under way use stores that are closed next
            self.offload.end()
            self.parts.sharding.remove()
        finally:
            release_norms(self.module)
            self.parts.bus.announce(Event.CLOSE)
            self.parts.mesh.close()


delegation.install(Engine)
