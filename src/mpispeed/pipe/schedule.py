"""Pipeline schedules, and their table by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpispeed.base.errors import ConfigError
from mpispeed.base.registry import Registry
from mpispeed.pipe.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from mpispeed.pipe.interleaved import InterleavedForward, InterleavedSchedule
from mpispeed.pipe.schedule_base import OrderedSchedule, Pass, PipeSchedule

# Scripts for DeepSpeed take the instructions from here.
__all__ = [
    "CHUNKED",
    "SCHEDULES",
    "BackwardInput",
    "BackwardPass",
    "BackwardWeight",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "ForwardPass",
    "GPipeSchedule",
    "InferenceSchedule",
    "InterleavedSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "OrderedSchedule",
    "Pass",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
    "ZeroBubbleSchedule",
    "build",
]


#: name in the configuration -> class
SCHEDULES: Registry[Callable[..., PipeSchedule]] = Registry("pipeline schedule", ignore_case=True)
#: names whose classes take `chunks`
CHUNKED = ("interleaved",)


class TrainSchedule(PipeSchedule):
    """1F1B: forward and backward passes alternate, so that few activations are alive.

    Stages of even number run forward in even steps and backward in odd ones, stages of odd number the other way round.
    A message is sent and received in the step after its pass, in an order that blocking sends survive.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """2 (M + P - 1) lists."""
        count = 2 * (self.micro_batches + self.stages - 1)
        for step in range(count):
            batch = self._batch_of(step)
            before = self._batch_of(step - 1) if step else -1
            parts = self._forward(batch, before) if self._is_forward(step) else self._backward(batch, before)
            if step == count - 1:
                parts += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield parts

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches between forward and backward here, and at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _is_forward(self, step: int) -> bool:
        return step % 2 == self.stage_id % 2

    def _batch_of(self, step: int) -> int:
        """The micro-batch of a step; out of range where the stage is idle."""
        if self._is_forward(step):
            return step // 2 - self.stage_id // 2
        if self.stage_id % 2:
            return step // 2 - self.stages + (self.stage_id + 1) // 2
        return (step - 1) // 2 - self.stages + 1 + self.stage_id // 2

    def _at(self, batch: int) -> tuple[int, int, int]:
        return self._buffer_idx(batch), 0, batch

    def _forward(self, batch: int, before: int) -> list[PipeInstruction]:
        parts: list[PipeInstruction] = []
        if self._valid_micro_batch(before) and not self.is_first_stage:
            parts.append(SendGrad(*self._at(before)))
        if self._valid_micro_batch(batch):
            if not self.is_first_stage:
                parts.append(RecvActivation(*self._at(batch)))
            if self.is_first_stage or self.is_last_stage:
                parts.append(LoadMicroBatch(*self._at(batch)))
            parts.append(ForwardPass(*self._at(batch)))
        return parts

    def _backward(self, batch: int, before: int) -> list[PipeInstruction]:
        parts: list[PipeInstruction] = []
        if self._valid_micro_batch(batch) and not self.is_last_stage:
            parts.append(RecvGrad(*self._at(batch)))
        if self._valid_micro_batch(before) and not self.is_last_stage:
            parts.append(SendActivation(*self._at(before)))
        if self._valid_micro_batch(batch):
            parts.append(BackwardPass(*self._at(batch)))
        return parts


class InferenceSchedule(PipeSchedule):
    """Forward passes only, with two buffers in turn; with several chunks, in the interleaved order."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """M + P - 1 lists for one chunk."""
        if self.num_chunks > 1:
            yield from InterleavedForward(*self._shape, self.num_chunks).steps()
            return
        for step in range(self.micro_batches + self.stages - 1):
            yield self._step(step)

    def num_pipe_buffers(self) -> int:
        """Two for each chunk."""
        return 2 * self.num_chunks

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.micro_batches, self.stages, self.stage_id

    def _step(self, step: int) -> list[PipeInstruction]:
        batch = step - self.stage_id
        # Counted by steps: the buffer of a micro-batch on one stage is the other one on the next.
        is_even = self.stage_id % 2 == 0
        here, other = (step % 2, (step + 1) % 2) if is_even else ((step + 1) % 2, step % 2)
        parts: list[PipeInstruction] = []
        messages: list[PipeInstruction] = []
        if self._valid_micro_batch(batch - 1) and not self.is_last_stage:
            messages.append(SendActivation(other, 0, batch - 1))
        if self._valid_micro_batch(batch):
            if self.is_first_stage or self.is_last_stage:
                parts.append(LoadMicroBatch(here, 0, batch))
            if not self.is_first_stage:
                # Even stages send first and odd ones receive first, so that blocking sends find their partner.
                messages.insert(len(messages) if is_even else 0, RecvActivation(here, 0, batch))
            messages.append(ForwardPass(here, 0, batch))
        return parts + messages


class DataParallelSchedule(PipeSchedule):
    """One stage: load, forward and backward for every micro-batch in turn."""

    def __init__(self, micro_batches: int, stages: int = 1, stage_id: int = 0) -> None:
        """As `PipeSchedule`.

        Raises:
            ConfigError: a number is out of range, or there are several stages.
        """
        if stages != 1:
            msg = f"DataParallelSchedule: stages is {stages}; it sends nothing to other stages, so it serves only 1"
            raise ConfigError(msg)
        super().__init__(micro_batches, stages, stage_id)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """M lists."""
        for batch in range(self.micro_batches):
            kinds = (LoadMicroBatch, ForwardPass, BackwardPass)
            parts: list[PipeInstruction] = [kind(0, 0, batch) for kind in kinds]
            if batch == self.micro_batches - 1:
                parts += [ReduceGrads(), OptimizerStep()]
            yield parts

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1


class GPipeSchedule(OrderedSchedule):
    """All forward passes, then all backward passes (arXiv 1811.06965). All activations are alive at once."""

    def passes(self, stage: int) -> Iterator[Pass]:
        """The passes; the order is the same on every stage."""
        yield from (Pass(ForwardPass, 0, batch) for batch in range(self.micro_batches))
        yield from (Pass(BackwardPass, 0, batch) for batch in range(self.micro_batches))


class ZeroBubbleSchedule(OrderedSchedule):
    """1F1B whose backward pass is split: first the gradient of the input, later that of the weights.

    Stage s keeps up to s weight passes back. Activations of at most P - s micro-batches are alive, as with 1F1B; with
    those that queued weight passes still need it is P on every stage.

    Source: ZB-H1 of arXiv 2401.10241, where weight gradients fill the time that stages wait.
    """

    def passes(self, stage: int) -> Iterator[Pass]:
        """The passes of one stage."""
        total = self.micro_batches
        forwards = min(self.stages - 1 - stage, total)
        yield from (Pass(ForwardPass, 0, batch) for batch in range(forwards))
        weights = 0
        for batch in range(total):
            if forwards < total:
                yield Pass(ForwardPass, 0, forwards)
                forwards += 1
            yield Pass(BackwardInput, 0, batch)
            if batch + 1 - weights > stage:
                yield Pass(BackwardWeight, 0, weights)
                weights += 1
        yield from (Pass(BackwardWeight, 0, batch) for batch in range(weights, total))


SCHEDULES.register("1f1b")(TrainSchedule)
SCHEDULES.register("gpipe")(GPipeSchedule)
SCHEDULES.register("interleaved")(InterleavedSchedule)
SCHEDULES.register("zb-h1")(ZeroBubbleSchedule)


def build(name: str, micro_batches: int, stages: int, stage_id: int, chunks: int = 1) -> PipeSchedule:
    """The training schedule of one stage by its name.

    Args:
        name: a key of `SCHEDULES`.
        micro_batches: micro-batches of a batch.
        stages: ranks of the pipeline.
        stage_id: this rank's place.
        chunks: virtual stages of each rank; more than one only for interleaved schedules.

    Raises:
        ConfigError: the name is unknown, a number is out of range, or the schedule has one chunk per rank.
    """
    kind = SCHEDULES[name]
    if name.lower() in CHUNKED:
        return kind(micro_batches, stages, stage_id, chunks)
    if chunks != 1:
        msg = f"pipeline schedule {name!r} with {chunks} chunks per stage: it has one; use {CHUNKED[0]!r}, or chunks=1"
        raise ConfigError(msg)
    return kind(micro_batches, stages, stage_id)
