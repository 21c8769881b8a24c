"""Base class of pipeline schedules, and schedules given by the order of their passes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpispeed.base.errors import ConfigError, ScheduleError
from mpispeed.pipe.instructions import (
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


class PipeSchedule(ABC):
    """The instructions of one stage for one batch.

    `steps()` gives lists of instructions; each list is atomic: ranks may meet in a barrier after each of them. Derive
    from this class for a schedule of your own, or from `OrderedSchedule`, which needs only the order of the passes, and
    let `pipe.check.check` prove it.

    A virtual stage is a chunk of layers. With v chunks on each of P stages, chunk c of stage s is virtual stage
    c * P + s; activations go from virtual stage k to k + 1, gradients from k + 1 to k.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int = 1) -> None:
        """A schedule of one stage.

        Args:
            micro_batches: micro-batches of a batch.
            stages: ranks of the pipeline.
            stage_id: this rank's place, from 0.
            chunks: virtual stages of each rank; more than one needs at least two stages.

        Raises:
            ConfigError: a number is out of range.
        """
        for what, value in (("micro_batches", micro_batches), ("stages", stages), ("chunks", chunks)):
            if value < 1:
                msg = f"{type(self).__name__}: {what} is {value}; expected at least 1"
                raise ConfigError(msg)
        if not 0 <= stage_id < stages:
            msg = f"{type(self).__name__}: stage_id is {stage_id}; expected 0 to {stages - 1} for {stages} stages"
            raise ConfigError(msg)
        if chunks > 1 and stages == 1:
            msg = (
                f"{type(self).__name__}: {chunks} chunks on 1 stage; chunks fill the time that stages wait for each "
                "other, so they need at least 2 stages; use chunks=1"
            )
            raise ConfigError(msg)
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._chunks = chunks

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The lists of instructions, in the order of their execution; empty lists are idle."""

    def num_pipe_buffers(self) -> int:
        """Number of buffers of this rank, over all chunks; buffer ids are below it."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """This rank's place in the pipeline."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches

    @property
    def num_chunks(self) -> int:
        """Virtual stages of each rank."""
        return self._chunks

    @property
    def is_first_stage(self) -> bool:
        """True for the rank with the first layers."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True for the rank with the last layers."""
        return self.stage_id == self.stages - 1

    def virtual_stage(self, chunk: int = 0) -> int:
        """Number of a chunk of this rank in the order of the layers."""
        return chunk * self.stages + self.stage_id

    def has_first_layers(self, chunk: int = 0) -> bool:
        """True for the chunk whose input is data."""
        return self.virtual_stage(chunk) == 0

    def has_last_layers(self, chunk: int = 0) -> bool:
        """True for the chunk whose output is the loss."""
        return self.virtual_stage(chunk) == self.stages * self._chunks - 1

    def _valid_micro_batch(self, micro_batch: int) -> bool:
        return 0 <= micro_batch < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch: int) -> int:
        """The buffer of a micro-batch, for schedules of one chunk."""
        return micro_batch % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps())

    def __repr__(self) -> str:
        chunks = f", chunks={self._chunks}" if self._chunks > 1 else ""
        return f"{type(self).__name__}({self.micro_batches}, {self.stages}, {self.stage_id}{chunks})"


class Pass(NamedTuple):
    """One computation: ForwardPass, BackwardPass, BackwardInput or BackwardWeight of one chunk and micro-batch."""

    kind: type[BufferOpInstruction]
    chunk: int
    micro_batch: int


class OrderedSchedule(PipeSchedule):
    """A schedule that is given by the order of the passes on every stage.

    Messages, buffers and steps follow from it: a pass receives right before it and sends right after it, in the
    earliest step after those it depends on.
    """

    @abstractmethod
    def passes(self, stage: int) -> Iterable[Pass]:
        """The passes of any stage of this pipeline, in their order. Depends on nothing else of this stage."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The lists of instructions.

        Raises:
            ScheduleError: the orders of the stages wait for each other.
        """
        orders = tuple(tuple(self.passes(stage)) for stage in range(self.stages))
        places, count = place_passes(orders, self.num_chunks)
        lists: list[list[PipeInstruction]] = [[] for _ in range(count)]
        for at, one in zip(places[self.stage_id], orders[self.stage_id], strict=True):
            lists[at] = self._with_messages(one)
        if self._is_training:
            lists[-1] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        return iter(lists)

    def num_pipe_buffers(self) -> int:
        """Number of micro-batches alive at once, summed over the chunks."""
        return sum(self._counts)

    @functools.cached_property
    def _is_training(self) -> bool:
        return any(one.kind is not ForwardPass for one in self.passes(self.stage_id))

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Buffers of each chunk; two where nothing waits for a backward pass."""
        if not self._is_training:
            return [2] * self.num_chunks
        alive, most = [0] * self.num_chunks, [1] * self.num_chunks
        for one in self.passes(self.stage_id):
            if one.kind is not BackwardWeight:
                alive[one.chunk] += 1 if one.kind is ForwardPass else -1
                most[one.chunk] = max(most[one.chunk], alive[one.chunk])
        return most

    def _buffer_of(self, one: Pass) -> int:
        return sum(self._counts[: one.chunk]) + one.micro_batch % self._counts[one.chunk]

    def _with_messages(self, one: Pass) -> list[PipeInstruction]:
        where = (self._buffer_of(one), one.chunk, one.micro_batch)
        is_first, is_last = self.has_first_layers(one.chunk), self.has_last_layers(one.chunk)
        parts: list[PipeInstruction] = []
        if one.kind is ForwardPass:
            if is_first or is_last:
                parts.append(LoadMicroBatch(*where))
            if not is_first:
                parts.append(RecvActivation(*where))
            parts.append(ForwardPass(*where))
            if not is_last:
                parts.append(SendActivation(*where))
            return parts
        if one.kind is not BackwardWeight and not is_last:
            parts.append(RecvGrad(*where))
        parts.append(one.kind(*where))
        if one.kind is not BackwardWeight and not is_first:
            parts.append(SendGrad(*where))
        return parts


@functools.lru_cache(maxsize=32)
def place_passes(orders: tuple[tuple[Pass, ...], ...], chunks: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The step of every pass when each takes one step and messages take none: per stage, and the number of steps.

    Args:
        orders: the passes of each stage.
        chunks: virtual stages of each stage.

    Raises:
        ScheduleError: the stages wait for each other for ever, or for a pass that is missing.
    """
    stages = len(orders)
    last = stages * chunks - 1
    places: list[list[int]] = [[] for _ in orders]
    done: dict[tuple[bool, int, int], int] = {}

    def needs(stage: int, one: Pass) -> int | None:
        """The step after which the pass can run; None if it is not known yet."""
        virtual = one.chunk * stages + stage
        if one.kind is ForwardPass:
            return -1 if virtual == 0 else done.get((True, virtual - 1, one.micro_batch))
        if one.kind is BackwardWeight or virtual == last:
            return -1
        return done.get((False, virtual + 1, one.micro_batch))

    has_moved = True
    while has_moved:
        has_moved = False
        for stage, order in enumerate(orders):
            mine = places[stage]
            while len(mine) < len(order):
                one = order[len(mine)]
                after = needs(stage, one)
                if after is None:
                    break
                mine.append(1 + max(after, mine[-1] if mine else -1))
                if one.kind is not BackwardWeight:
                    done[one.kind is ForwardPass, one.chunk * stages + stage, one.micro_batch] = mine[-1]
                has_moved = True
    _refuse_waiting(orders, places)
    return tuple(map(tuple, places)), 1 + max((mine[-1] for mine in places if mine), default=-1)


def _refuse_waiting(orders: Sequence[Sequence[Pass]], places: Sequence[Sequence[int]]) -> None:
    waiting = [
        f"stage {stage} at pass {len(mine)}, {order[len(mine)].kind.__name__} of micro-batch "
        f"{order[len(mine)].micro_batch}, chunk {order[len(mine)].chunk}"
        for stage, (order, mine) in enumerate(zip(orders, places, strict=True))
        if len(mine) < len(order)
    ]
    if waiting:
        msg = f"these passes wait for each other, or for one that no stage has: {'; '.join(waiting)}"
        raise ScheduleError(msg)
