"""The training engine: forward, backward and step."""

from __future__ import annotations

import functools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from mpispeed.base.device import start_reading
from mpispeed.base.errors import MpispeedError
from mpispeed.base.events import Event
from mpispeed.base.tensor_tree import move
from mpispeed.engine import delegation
from mpispeed.engine.backward import Accumulation, DirectBackward, backward_scaled, divided, require_scalar
from mpispeed.engine.build.loaders import Loaders
from mpispeed.engine.build.parts import Parts
from mpispeed.engine.composition import Composition, compose
from mpispeed.engine.curriculum import Curricula
from mpispeed.engine.getters import Getters
from mpispeed.engine.slot_losses import mean_of
from mpispeed.engine.state.checkpoints import Checkpoints
from mpispeed.engine.state.offload_states import OffloadStates
from mpispeed.engine.state.weights import Weights
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
        result: R = getattr(getattr(self.mpispeed, name), method.__name__)(*args, **kwargs)
        return result

    call.__qualname__, call.__module__ = f"Engine.{method.__name__}", __name__
    return call


class Engine(Getters):
    """Trains a model under a plan. Built by `mpispeed.initialize`; the model itself is `engine.module`.

    DeepSpeed's getters are in `engine/delegation.py`. Other names are looked up on the model, then among what features
    have published, then in `mpispeed`; so a model may have a `parts` or `weights` of its own.

    Attributes:
        module: the model.
        mpispeed: the objects that do the work, under a name that no model has.
    """

    def __init__(self, parts: Parts) -> None:
        """Collective over: all ranks."""
        super().__init__()
        self.mpispeed = compose(parts)
        self.module = parts.module
        if parts.optimization is not None:
            parts.optimization.link.attach(self._update_now, parts.updates.settle)

    # -- components ------------------------------------------------------------------------------------------

    @property
    def lr_scheduler(self) -> Any | None:
        """The learning-rate scheduler, or None; another may be put in its place, which steps from then on."""
        return self.mpispeed.updates.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any | None) -> None:
        self.mpispeed.updates.follow(scheduler)
        self.mpispeed.parts.scheduler = scheduler

    # -- one micro-batch ---------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; returns its output, unchanged unless `amp` casts it."""
        own = self.mpispeed
        parts = own.parts
        parts.require("forward", (Kind.lp_params,))
        own.direct.settle()
        parts.begin_forward(parts.counters.finished_micro_steps, is_training=self.training)
        if parts.features.batches:
            inputs, kwargs = parts.features.batch((inputs, kwargs), is_training=self.training)
        if parts.plan.device.type != "cpu":
            inputs, kwargs = move((inputs, kwargs), parts.plan.device)
        inputs, kwargs = parts.casting.inputs(inputs), parts.casting.keywords(kwargs)
        start = parts.clock.now()
        with parts.sharding.unwinding(), parts.casting.forward(), parts.in_forward():
            output = parts.casting.result(self.module(*inputs, **kwargs))
        parts.passes.end(output)
        parts.bus.announce(Event.FORWARD_END, seconds=parts.clock.now() - start)
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
        own = self.mpispeed
        parts, is_local = own.parts, own.accumulation.is_local
        parts.require("backward", (Kind.lp_params, Kind.lp_grads))
        grads, start = parts.trained("backward").grads, parts.clock.now()
        if parts.clock.entering is not None:
            parts.clock.entering("backward")
        own.direct.settle()
        if not allreduce_gradients:
            parts.require_whole_grads("engine.backward(allreduce_gradients=False)")
        require_scalar(loss, "engine.backward", "sum or average it first, or call its own backward(gradient)")
        parts.features.before_backward(loss)
        mean, loss, steps = own.accumulation.divide(loss, scale_wrt_gas=scale_wrt_gas)
        grads.begin_backward(reduces=self.is_gradient_accumulation_boundary() and allreduce_gradients and not is_local)
        with parts.sharding.unwinding(), divided(steps), parts.casting.named():
            backward_scaled(loss, parts.scaler.scale, retain_graph=retain_graph)
        parts.end_backward()
        own.updates.add_loss(start_reading(loss))
        parts.bus.announce(Event.BACKWARD_END, seconds=parts.clock.now() - start)
        return mean

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at a boundary reduce, clip, update and advance the schedule.

        Gradients that backward has not reduced, because the boundary was not known then, are reduced here.

        Collective over: the data axis, at boundaries; all ranks, where `walltime.save_dir` is set.

        Raises:
            UsageError: inside `no_sync`, there is no optimizer, or (then on every rank) no rank has run a backward pass
                before an update.
            RunEnded: (a SystemExit) on all ranks: the run was saved because its job ends or it was asked to stop.
        """
        own = self.mpispeed
        own.parts.trained("step")
        own.parts.require("step")
        own.accumulation.require_summed()
        own.direct.settle()
        own.updates.was_applied = False
        if self.is_gradient_accumulation_boundary():
            own.accumulation.warn_of_fewer()
            own.updates.run(own.parts.plan.batch.train_batch_size, lr_kwargs or {})
        own.parts.counters.micro_steps += 1
        for end in own.parts.features.after_steps:
            end()

    def _update_now(self) -> None:
        """`step` at a boundary, wherever the micro-batches are; `optimizer.step()` calls it."""
        with self.mpispeed.accumulation.overridden(True):
            self.step()

    def train_batch(self, data_iter: Iterator[Any], loss_fn: Callable[..., torch.Tensor] | None = None) -> float:
        """Run all micro-batches of one global batch and the step; returns this rank's mean loss.

        With `reduction` "invariant" it is the mean of all slots, the same on all ranks.

        Args:
            data_iter: yields the model's arguments as a tuple, or one tensor.
            loss_fn: computes the loss from the model's output and the batch; without it the output is the loss.

        Collective over: the data axis.
        """
        losses: list[float | Readback] = []
        for _ in range(self.mpispeed.accumulation.steps):
            batch = next(data_iter)
            if (device := self.mpispeed.parts.plan.device).type != "cpu":
                batch = move(batch, device)
            arguments = batch if isinstance(batch, tuple | list) else (batch,)
            output = self(*arguments)
            losses.append(start_reading(self.backward(output if loss_fn is None else loss_fn(output, batch))))
            self.step()
        return mean_of(losses, self.mpispeed.updates.slot_losses)

    # -- accumulation ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward adds gradients locally, without reductions; the caller scales the loss.

        Raises:
            UsageError: gradients are sharded over ranks, or the context is entered twice.
        """
        self.mpispeed.parts.require_whole_grads("no_sync context manager")
        with self.mpispeed.accumulation.local():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.module.zero_grad(set_to_none=set_to_none)
        optimization = self.mpispeed.parts.optimization
        if optimization:
            optimization.grads.clear()

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
    set_custom_curriculum_learning_schedule = _delegated("curricula", Curricula.set_custom_curriculum_learning_schedule)
    is_map_style_dataset = _delegated("loaders", Loaders.is_map_style_dataset)
    is_iterable_style_dataset = _delegated("loaders", Loaders.is_iterable_style_dataset)
    offload_states = _delegated("offload", OffloadStates.offload_states)
    reload_states = _delegated("offload", OffloadStates.reload_states)
    # Names that other libraries call.
    _backward_epilogue = _delegated("direct", DirectBackward.settle)
    _consolidated_16bit_state_dict = _delegated("weights", Weights.whole_state_dict)
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written in the background or has not been waited for."""
        return self.mpispeed.checkpoints.is_saving

    @property
    def client_state(self) -> dict[str, Any]:
        """Goes into checkpoints that are made because the run ends, and comes back when it is resumed."""
        return self.mpispeed.checkpoints.client_state

    @client_state.setter
    def client_state(self, state: dict[str, Any]) -> None:
        self.mpispeed.checkpoints.client_state = state

    def heed_requests(self) -> None:
        """Let features do what they do between steps: `walltime` saves or ends the run now, if requested.

        For long evaluations, called by all ranks alike. No effect within a global batch, or without
        `walltime.save_dir`. `engine.step` does the same at its end.

        Collective over: all ranks.

        Raises:
            RunEnded: the run is saved and has to end.
        """
        for heed in self.mpispeed.parts.features.between_steps:
            heed()

    def _backward_prologue(self) -> None:
        """No operation: a pass begins with its first gradient. Scripts call this before `loss.backward()`."""

    # -- other names ---------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError:
            own = vars(self).get("mpispeed")
            published = {} if own is None else own.parts.features.published
            if name in published:
                return published[name]
            if own is not None and name in Composition.__dataclass_fields__:
                return getattr(own, name)
            raise

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`. Local.

        Between synchronisations of local updates, data ranks train their own parameters and evaluate the common ones.

        Raises:
            UsageError: this has to switch between them, and states that it needs are offloaded.
        """
        super().train(mode)
        parts = self.mpispeed.parts
        parts.is_training = mode
        if not parts.is_closed and parts.optimization:
            parts.optimization.exchange.show(is_training=mode)
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
        if not self.mpispeed.parts.is_closed:
            try:
                self.wait_checkpoint()
            finally:
                if not self.is_saving:  # saving after an interrupt: the save goes on, and needs the mesh
                    self.mpispeed.parts.is_closed = True
                    self._take_apart()
                    self.mpispeed.checkpoints.close()

    def _take_apart(self) -> None:
        parts = self.mpispeed.parts
        optimization = parts.optimization
        if optimization:
            optimization.hooks.remove()
            optimization.unguard()
        parts.sharding.meet("engine.destroy()")
        if optimization and not parts.params.away:
            optimization.exchange.show(is_training=False)  # the model keeps the common parameters
        try:
            if optimization:
                with suppress(MpispeedError):  # the channel may be broken already
                    optimization.grads.end()  # reductions under way use stores that are closed next
            self.mpispeed.offload.end()
            parts.sharding.remove()
        finally:
            parts.bus.announce(Event.CLOSE)
            parts.mesh.close()


delegation.install(Engine)
