"""The pipeline engine: runs global batches over stages by a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError, PipelineError, ScheduleError, UnimplementedUse, UsageError
from mpispeed.base.events import Event
from mpispeed.base.split_grads import split
from mpispeed.data.loader import RepeatingLoader
from mpispeed.engine.build.recomputing import configure_recomputation
from mpispeed.engine.engine import Engine
from mpispeed.engine.observe.reports import describe_pipeline
from mpispeed.engine.pipeline_callbacks import StageDuties, run_batch
from mpispeed.nn import activation_checkpointing
from mpispeed.nn.cut_marks import is_cut, mark_cut
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check import check
from mpispeed.pipe.chunk import recompute
from mpispeed.pipe.exchange import Exchange, Slices
from mpispeed.pipe.run import Executor, Place
from mpispeed.pipe.schedule import InferenceSchedule, PipeSchedule, build

if TYPE_CHECKING:
    from mpispeed.engine.build.parts import Parts
    from mpispeed.mesh.comm import Comm
    from mpispeed.pipe.module import PipelineModule

log = logging.getLogger(__name__)

ScheduleFactory = Callable[[int, int, int], PipeSchedule]
"""(micro-batches, stages, stage) -> schedule of that stage."""


def _refused(name: str) -> Callable[..., Any]:
    """A method of `Engine` that a pipeline refuses."""

    def method(*args: Any, **kwargs: Any) -> Any:
        """Refused: several micro-batches are under way at once.

        Raises:
            PipelineError: always.
        """
        msg = (
            f"a pipeline has no {name}() of its own: forward and backward passes of several micro-batches run at once; "
            "call engine.train_batch(data_iter) or engine.eval_batch(data_iter)"
        )
        raise PipelineError(msg)

    method.__name__, method.__qualname__ = name, f"PipelineEngine.{name}"
    return method


class PipelineEngine(Engine):
    """Trains a `PipelineModule`, one stage per coordinate of the pipe axis. Built by `mpispeed.initialize`.

    Source of the API: DeepSpeed's documentation of pipeline parallelism.
    """

    def __init__(self, model: PipelineModule, parts: Parts) -> None:
        """Collective over: all ranks."""
        super().__init__(parts)
        config, mesh = parts.plan.config.pipeline, parts.mesh
        self.is_pipe_parallel = model.num_stages > 1
        place = Place(model.stage_id, model.num_stages, model.num_chunks)
        name = _schedule_name(config.schedule, model.num_chunks)
        self._make_schedule = _factory(name, model.num_chunks)
        self._schedules: dict[int, PipeSchedule] = {}
        self._unsplit: Callable[[], None] | None = None
        slices = Slices(mesh["model"])
        exchange = Exchange(
            (mesh.channel("pipe") if self.is_pipe_parallel else mesh)["pipe"],
            slices if config.pipe_partitioned else None,
            slices if config.grad_partitioned else None,
            is_cut,
            mark_cut,
            parts.plan.device,
        )
        self._duties = StageDuties(parts, model, self._finish_batch)
        self._executor = Executor(place, exchange, self._duties)
        schedule = self._schedule(
            parts.plan.batch.gradient_accumulation_steps
        )  # raises for schedules that are not possible
        configure_recomputation(parts.plan, mesh, micro_batches=schedule.num_pipe_buffers())
        function = model.activation_checkpoint_func
        if function is recompute and activation_checkpointing.is_configured():
            function = activation_checkpointing.checkpoint
        interval = config.activation_checkpoint_interval or model.activation_checkpoint_interval
        if mesh["sequence"].size > 1:
            model.grid.share_sequences(mesh)
            parts.bus.subscribe(Event.CLOSE, lambda _: model.grid.share_sequences(None))
        self._restore_recomputation = model.set_activation_checkpointing(interval, function)
        if mesh.rank == 0:
            for row in describe_pipeline(parts, schedule, name):
                log.info("%-10s %s", *row)

    # -- place of this rank ----------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._executor.place.stages

    @property
    def stage_id(self) -> int:
        """Stage of this rank."""
        return self._executor.place.stage

    def is_first_stage(self) -> bool:
        """True on the stage that loads inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True on the stage that computes losses."""
        return self.stage_id == self.num_stages - 1

    # -- data --------------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Any) -> None:
        """Take batches from `loader`, restarting it when it ends. Middle stages ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self._duties.data = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take batches from `iterator`. Middle stages ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self._duties.data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Apply `fn` to every batch that is loaded. Middle stages load none."""
        self._duties.batch_fn = fn

    # -- training ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: Any = None) -> torch.Tensor:  # type: ignore[override]
        """Train on one global batch: one micro-batch per accumulation step, and an update.

        Args:
            data_iter: yields pairs (inputs, labels); first and last stages take one for each micro-batch, the others
                none. By default the iterator or loader that was set, or the loader of `training_data`.
            loss_fn: must be None: the loss belongs to the `PipelineModule`.

        Returns:
            The mean loss over micro-batches and data ranks, the same scalar on every rank.

        Collective over: all ranks.

        Raises:
            UsageError: (a RuntimeError) gradients are switched off.
            DataEnded: (a StopIteration) on every rank, if the iterator of one is at its end; on that rank only, if it
                ends within the batch.
            PipelineError: (a RuntimeError) the batch failed on another rank, which raises the failure itself. Nothing
                was updated, and the next batch may follow.
            RunEnded: (a SystemExit) on all ranks: the run was saved because its job ends or it was asked to stop.
        """
        if not torch.is_grad_enabled():
            msg = "engine.train_batch() needs gradients and runs under torch.no_grad(); use engine.eval_batch()"
            raise UsageError(msg)
        if loss_fn is not None:
            msg = "engine.train_batch(loss_fn=...): give the loss to PipelineModule(layers, loss_fn=...)"
            raise UsageError(msg)
        parts, duties = self.mpispeed.parts, self._duties
        parts.trained("train_batch")
        parts.require("train_batch")
        self.train()
        steps = parts.plan.batch.gradient_accumulation_steps
        duties.begin_training(self._feed(data_iter), steps)
        self._run(self._schedule(steps), is_training=True)
        loss = torch.tensor(duties.mean_loss)
        for end in parts.features.after_steps:
            end()
        return loss

    def _finish_batch(self, mean_loss: float) -> None:
        """Run the update, the last instruction of a schedule. Collective over: all ranks."""
        updates, parts = self.mpispeed.updates, self.mpispeed.parts
        batch, counters = parts.plan.batch, parts.counters
        updates.losses = [mean_loss]
        counters.micro_steps += batch.gradient_accumulation_steps - 1
        updates.run(batch.train_batch_size, {})
        counters.micro_steps += 1

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one global batch, without gradients and without an update.

        Args:
            data_iter: as for `train_batch`; the training iterator does not move.
            return_logits: return (result, outputs of the last micro-batch), the latter on the last stage.
            compute_loss: False: the result consists of the last layer's outputs.
            reduce_output: "avg": mean over micro-batches and data ranks; None: a list with one entry per micro-batch.
            bcast_loss: send the result to all stages; otherwise, or without `compute_loss`, the others get None.
            num_micro_batches: instead of the accumulation steps.

        Collective over: all ranks.

        Raises:
            UsageError: another value of `reduce_output` (also a NotImplementedError).
            DataEnded: (a StopIteration) as for `train_batch`.
            PipelineError: (a RuntimeError) as for `train_batch`.
        """
        if reduce_output not in ("avg", None):
            msg = f'engine.eval_batch(reduce_output={reduce_output!r}): "avg" and None are known'
            raise UnimplementedUse(msg)
        self.mpispeed.parts.require("eval_batch")
        self.heed_requests()
        was_training, duties, place = self.training, self._duties, self._executor.place
        steps = num_micro_batches or self.mpispeed.parts.plan.batch.gradient_accumulation_steps
        schedule = InferenceSchedule(steps, place.stages, place.stage, chunks=place.chunks)
        kept = duties.data
        self.eval()
        try:
            duties.begin_evaluation(data_iter, computes_loss=compute_loss)
            with torch.no_grad():
                self._run(schedule, is_training=False)
            result = duties.evaluated(self._executor.losses, reduce_output, is_shared=bcast_loss and compute_loss)
        finally:
            duties.data = kept
            self.train(was_training)
        return (result, duties.last_outputs) if return_logits else result

    def get_additional_losses(self) -> dict[str, float] | None:
        """Additional losses reported by the module, averaged over the last training batch; None if there are none."""
        return self._duties.extra_losses or None

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while gradients are reduced and the update runs."""
        return self._duties.is_at_boundary

    def set_schedule(self, make: ScheduleFactory | None, *, name: str = "1f1b") -> None:
        """Train by another schedule: `make(micro_batches, stages, stage)`, or a named one.

        Schedules of `make` are proved by `pipe.check`, here and in `train_batch` for other numbers of micro-batches.

        Collective over: all ranks, with the same arguments.

        Raises:
            ConfigError: no schedule of that name, or it does not fit the module's chunks. The old schedule stays.
            ScheduleError: on every rank, if stages would deadlock or mix up micro-batches. The old schedule stays.
        """
        parts, chunks = self.mpispeed.parts, self._executor.place.chunks
        steps = parts.plan.batch.gradient_accumulation_steps
        factory = _factory(name, chunks) if make is None else _proved(make, chunks, parts.mesh.world.comm)
        schedule = self._made_by(factory, steps)
        self._make_schedule, self._schedules = factory, {steps: schedule}

    def reset_activation_shape(self) -> None:
        """Send shapes again. Shapes may change at any time; this is here for DeepSpeed scripts."""
        self._executor.exchange.forget_shapes()

    def load_module_state_dict(
        self,
        checkpoint: Any,
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """As `Engine.load_module_state_dict`, for the layers of this stage.

        Collective over: the data axis.

        Raises:
            UsageError: a path is given, or None: layers have no files of their own.
            CheckpointError: (a RuntimeError) on every rank, if names or shapes do not fit.
        """
        if not isinstance(checkpoint, Mapping):
            msg = (
                f"engine.load_module_state_dict({checkpoint!r}): layers of a pipeline have no files of their own here; "
                "call engine.load_checkpoint(load_dir, tag, load_module_only=True), or pass a state dict of this stage"
            )
            raise UsageError(msg)
        super().load_module_state_dict(checkpoint, strict, custom_load_fn, fetch_z3_params)

    # -- refused methods ---------------------------------------------------------------------------------------------

    scale = _refused("scale")
    allreduce_gradients = _refused("allreduce_gradients")
    forward = _refused("forward")
    backward = _refused("backward")
    step = _refused("step")
    no_sync = _refused("no_sync")
    set_gradient_accumulation_boundary = _refused("set_gradient_accumulation_boundary")

    # -- parts -------------------------------------------------------------------------------------------------------

    def _schedule(self, micro_batches: int) -> PipeSchedule:
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = self._made_by(self._make_schedule, micro_batches)
        return self._schedules[micro_batches]

    def _made_by(self, make: ScheduleFactory, micro_batches: int) -> PipeSchedule:
        """This stage's schedule; splits the backward of layers if the schedule needs that."""
        place = self._executor.place
        schedule = make(micro_batches, place.stages, place.stage)
        has_passes = any(isinstance(one, do.BackwardInput) for step in schedule.steps() for one in step)
        if has_passes and self._unsplit is None:
            self._unsplit = split(self.module)
        return schedule

    def _run(self, schedule: PipeSchedule, *, is_training: bool) -> None:
        """Run one global batch. Collective over: all ranks."""
        run_batch(self._executor, self._duties, schedule, self.mpispeed.parts.mesh.world.comm, is_training=is_training)

    def _feed(self, data_iter: Iterator[Any] | None) -> Iterator[Any] | None:
        if data_iter is not None:
            return data_iter
        if self._duties.data is None and self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)
        if self._duties.data is None and (self.is_first_stage() or self.is_last_stage()):
            msg = (
                "engine.train_batch() has no data: pass an iterator, give training_data to initialize, or call "
                "engine.set_dataloader"
            )
            raise UsageError(msg)
        return self._duties.data

    def _take_apart(self) -> None:
        if self._unsplit is not None:
            self._unsplit()
        self._restore_recomputation()
        super()._take_apart()


def _schedule_name(wanted: str | None, chunks: int) -> str:
    """Name of the schedule: that of the config, or the default for the module's chunks.

    Raises:
        ConfigError: the config's schedule does not fit the chunks.
    """
    if wanted is not None and (wanted == "interleaved") != (chunks > 1):
        msg = (
            f'pipeline.schedule is "{wanted}", and the PipelineModule has {chunks} chunk{"s" if chunks > 1 else ""} '
            "per stage: interleaved needs at least two (num_chunks=2), the others take one; change either"
        )
        raise ConfigError(msg)
    return wanted or ("interleaved" if chunks > 1 else "1f1b")


def _factory(name: str, chunks: int) -> ScheduleFactory:
    def make(micro_batches: int, stages: int, stage: int) -> PipeSchedule:
        return build(name, micro_batches, stages, stage, chunks=chunks)

    return make


def _proved(make: ScheduleFactory, chunks: int, comm: Comm) -> ScheduleFactory:
    """`make` with schedules proved before one is returned; calls are collective over `comm`."""

    def proved(micro_batches: int, stages: int, stage_id: int) -> PipeSchedule:
        where = f"the schedule that engine.set_schedule was given, for {micro_batches} micro-batches, {stages} stages"
        with comm.together(ScheduleError, doing=where):
            found = [make(micro_batches, stages, each) for each in range(stages)]
            problem = _flaw(found, micro_batches, chunks)
            if problem:
                raise ScheduleError(problem)
        return found[stage_id]

    return proved


def _flaw(schedules: Sequence[PipeSchedule], micro_batches: int, chunks: int) -> str:
    """The reason why schedules of all stages cannot train a module of so many chunks, or "".

    Raises:
        ScheduleError: the check has failed.
    """
    proof, first = check(schedules), schedules[0]
    if (first.num_micro_batches, first.num_chunks) != (micro_batches, chunks):
        return (
            f"it is of {first.num_micro_batches} micro-batches and {first.num_chunks} chunks per stage, and the "
            f"PipelineModule has {chunks}"
        )
    return "" if proof.is_training else "it has no backward passes"
