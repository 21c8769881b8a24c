"""The engine of a pipeline: whole global batches, by a schedule, over stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError, MpispeedError, PipelineError, ScheduleError, UsageError
from mpispeed.base.split_grads import split
from mpispeed.data.loader import RepeatingLoader
from mpispeed.engine.engine import Engine
from mpispeed.engine.recomputing import configure_recomputation
from mpispeed.engine.reports import describe_pipeline
from mpispeed.engine.stage_duties import StageDuties
from mpispeed.nn import checkpointing
from mpispeed.nn.cut_marks import is_cut, mark_cut
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check import check
from mpispeed.pipe.chunk import recompute
from mpispeed.pipe.exchange import Exchange, Slices
from mpispeed.pipe.run import Executor, Place
from mpispeed.pipe.schedule import InferenceSchedule, PipeSchedule, build

if TYPE_CHECKING:
    from mpispeed.engine.parts import Parts
    from mpispeed.mesh.comm import Comm
    from mpispeed.pipe.module import PipelineModule

log = logging.getLogger(__name__)

ScheduleFactory = Callable[[int, int, int], PipeSchedule]
"""Makes a schedule of (micro-batches, stages, stage)."""


def _refused(name: str) -> Callable[..., Any]:
    """A method that other engines have."""

    def method(*args: Any, **kwargs: Any) -> Any:
        """Refused: several micro-batches are in work at once.

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

    def __init__(self, parts: Parts, model: PipelineModule) -> None:
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
            (mesh.lane("pipe") if self.is_pipe_parallel else mesh)["pipe"],
            slices if config.pipe_partitioned else None,
            slices if config.grad_partitioned else None,
            is_cut,
            mark_cut,
            parts.plan.device,
        )
        self._duties = StageDuties(parts, model, self._finish_batch)
        self._executor = Executor(place, exchange, self._duties)
        schedule = self._schedule(parts.plan.batch.gradient_accumulation_steps)  # refuses what cannot be
        configure_recomputation(parts.plan, mesh, micro_batches=schedule.num_pipe_buffers())
        function = model.activation_checkpoint_func
        if function is recompute and checkpointing.is_configured():
            function = checkpointing.checkpoint
        interval = config.activation_checkpoint_interval or model.activation_checkpoint_interval
        self._restore_recomputation = model.set_activation_checkpointing(interval, function)
        if mesh.rank == 0:
            for row in describe_pipeline(parts, schedule, name):
                log.info("%-10s %s", *row)

    # -- where this rank stands ------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._executor.place.stages

    @property
    def stage_id(self) -> int:
        """Stage of this rank."""
        return self._executor.place.stage

    def is_first_stage(self) -> bool:
        """True where micro-batches enter."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """True where losses are made."""
        return self.stage_id == self.num_stages - 1

    # -- data --------------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Any) -> None:
        """Take batches from `loader`, from its beginning again when it ends. Middle stages ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self._duties.data = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take batches from `iterator`. Middle stages ignore it."""
        if self.is_first_stage() or self.is_last_stage():
            self._duties.data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Change every batch that is loaded by `fn`. Middle stages ignore it."""
        self._duties.batch_fn = fn

    # -- training ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: Any = None) -> torch.Tensor:  # type: ignore[override]
        """Train on one global batch: as many micro-batches as there are accumulation steps, and an update.

        Args:
            data_iter: yields pairs (inputs, labels); first and last stages take one for each micro-batch, the others
                none. Without it what was set is used, or the loader of `training_data`.
            loss_fn: must be None: the loss belongs to the `PipelineModule`.

        Returns:
            The mean loss over micro-batches and data ranks, the same scalar on every rank.

        Collective over: all ranks.

        Raises:
            UsageError: (a RuntimeError) gradients are switched off, or the iterator ends within the batch.
            RunEnded: (a SystemExit) on all ranks: the run was saved because its job ends or it was asked to stop.
        """
        if not torch.is_grad_enabled():
            msg = "engine.train_batch() needs gradients and runs under torch.no_grad(); use engine.eval_batch()"
            raise UsageError(msg)
        if loss_fn is not None:
            msg = "engine.train_batch(loss_fn=...): give the loss to PipelineModule(layers, loss_fn=...)"
            raise UsageError(msg)
        self._optimization("train_batch")
        self._require("train_batch")
        self.train()
        duties, steps = self._duties, self.plan.batch.gradient_accumulation_steps
        duties.begin_training(self._feed(data_iter), steps)
        with duties.gathered(is_held=self.plan.gathers_once):
            self._executor.run(self._schedule(steps), is_training=True)
        loss = torch.tensor(duties.mean_loss)
        self._end_step()
        return loss

    def _finish_batch(self, mean_loss: float) -> None:
        """What the last instruction of a schedule asks for. Collective over: all ranks."""
        self._losses = [mean_loss]
        steps = self.plan.batch.gradient_accumulation_steps
        self.counters.micro_steps += steps - 1
        self._was_step_applied = False
        self._run_step({})
        self.counters.micro_steps += 1

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
            data_iter: as for `train_batch`, whose own iterator stays where it is.
            return_logits: return (result, outputs of the last micro-batch), the latter on the last stage.
            compute_loss: False: the result is made of the outputs of the last layer.
            reduce_output: "avg": mean over micro-batches and data ranks; None: a list with one entry per micro-batch.
            bcast_loss: give the result to all stages; otherwise, and without `compute_loss`, the others get None.
            num_micro_batches: instead of the accumulation steps.

        Collective over: all ranks.

        Raises:
            UsageError: another value of `reduce_output`, or the iterator ends within the batch.
        """
        if reduce_output not in ("avg", None):
            msg = f'engine.eval_batch(reduce_output={reduce_output!r}): "avg" and None are known'
            raise UsageError(msg)
        self._require("eval_batch")
        self.heed_requests()
        was_training, duties, place = self.training, self._duties, self._executor.place
        steps = num_micro_batches or self.plan.batch.gradient_accumulation_steps
        schedule = InferenceSchedule(steps, place.stages, place.stage, chunks=place.chunks)
        kept = duties.data
        self.eval()
        try:
            duties.begin_evaluation(data_iter, computes_loss=compute_loss)
            with torch.no_grad(), duties.gathered(is_held=self.plan.gathers_once):
                self._executor.run(schedule, is_training=False)
            result = duties.evaluated(self._executor.losses, reduce_output, is_shared=bcast_loss and compute_loss)
        finally:
            duties.data = kept
            self.train(was_training)
        return (result, duties.last_outputs) if return_logits else result

    def get_additional_losses(self) -> dict[str, float] | None:
        """What the module reported beside the loss, averaged over the last training batch; None if nothing."""
        return self._duties.extra_losses or None

    def is_gradient_accumulation_boundary(self) -> bool:
        """True while gradients are summed over ranks and the update runs."""
        return self._duties.is_at_boundary

    def set_schedule(self, make: ScheduleFactory | None, *, name: str = "1f1b") -> None:
        """Train by another schedule: `make(micro_batches, stages, stage)`, or one known by `name`.

        What `make` returns is proved by `pipe.check`, here and in `train_batch` for another number of micro-batches.

        Collective over: all ranks, with the same arguments.

        Raises:
            ConfigError: no schedule of that name, or it does not go with the module's chunks. The schedule stays.
            ScheduleError: on every rank, if stages would wait for ever or mix up what they hold; alike.
        """
        chunks, steps = self._executor.place.chunks, self.plan.batch.gradient_accumulation_steps
        factory = _factory(name, chunks) if make is None else _proved(make, chunks, self.mesh.world.comm)
        schedule = self._made_by(factory, steps)
        self._make_schedule, self._schedules = factory, {steps: schedule}

    def reset_activation_shape(self) -> None:
        """Announce shapes anew. Shapes may change at any time; this is here for DeepSpeed scripts."""
        self._executor.exchange.forget_shapes()

    # -- what a pipeline has not -------------------------------------------------------------------------------------

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
        """This stage's schedule; layers that it needs split are, from then on."""
        place = self._executor.place
        schedule = make(micro_batches, place.stages, place.stage)
        has_passes = any(isinstance(one, do.BackwardInput) for step in schedule.steps() for one in step)
        if has_passes and self._unsplit is None:
            self._unsplit = split(self.module)
        return schedule

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
    """The schedule of the config, or what fits the module.

    Raises:
        ConfigError: these do not fit each other.
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
    """`make`, whose schedules are proved before one is returned; a call is collective over `comm`."""

    def proved(micro_batches: int, stages: int, stage_id: int) -> PipeSchedule:
        problem, found = "", list[PipeSchedule]()
        try:
            found = [make(micro_batches, stages, each) for each in range(stages)]
            problem = _flaw(found, micro_batches, chunks)
        except MpispeedError as error:
            problem = str(error)
        where = f"the schedule that engine.set_schedule was given, for {micro_batches} micro-batches, {stages} stages"
        comm.agree(not problem, f"{where}: {problem}", ScheduleError)
        return found[stage_id]

    return proved


def _flaw(schedules: Sequence[PipeSchedule], micro_batches: int, chunks: int) -> str:
    """Why schedules of all stages cannot train a module of so many chunks; "" if they can.

    Raises:
        ScheduleError: they do not hold at all.
    """
    proof, first = check(schedules), schedules[0]
    if (first.num_micro_batches, first.num_chunks) != (micro_batches, chunks):
        return (
            f"it is of {first.num_micro_batches} micro-batches and {first.num_chunks} chunks per stage, and the "
            f"PipelineModule has {chunks}"
        )
    return "" if proof.is_training else "it has no backward passes"
