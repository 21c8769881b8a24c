"""Interleaved schedules: every rank has several chunks of layers (arXiv 2104.04473)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from mpispeed.base.errors import ConfigError
from mpispeed.pipe.instructions import BackwardPass, ForwardPass
from mpispeed.pipe.schedule_base import OrderedSchedule, Pass


class InterleavedSchedule(OrderedSchedule):
    """1F1B over several chunks of layers per rank.

    Micro-batches go in groups of as many as there are stages, each group through all chunks of a rank. The bubble
    shrinks by the number of chunks, messages grow by it, and more activations are alive. Where the stages do not divide
    the micro-batches, the order is that of the next multiple, without the missing micro-batches.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int = 2) -> None:
        """As `PipeSchedule`.

        Raises:
            ConfigError: a number is out of range, or there is only one chunk or one stage.
        """
        if chunks == 1:
            msg = "an interleaved schedule with chunks=1 would only keep more activations; use chunks=2, or 1f1b"
            raise ConfigError(msg)
        super().__init__(micro_batches, stages, stage_id, chunks)

    def passes(self, stage: int) -> tuple[Pass, ...]:
        """The passes of one stage."""
        return _passes(self.micro_batches, self.stages, self.num_chunks, stage)


class InterleavedForward(OrderedSchedule):
    """Only the forward passes of an interleaved schedule, for evaluation."""

    def passes(self, stage: int) -> Iterator[Pass]:
        """The passes; the order is the same on every stage."""
        for turn in range(-(-self.micro_batches // self.stages) * self.stages * self.num_chunks):
            chunk, batch = chunk_and_batch(turn, self.stages, self.num_chunks)
            if batch < self.micro_batches:
                yield Pass(ForwardPass, chunk, batch)


def chunk_and_batch(turn: int, stages: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of a forward pass by its number, for any number of micro-batches."""
    return turn // stages % chunks, turn // (stages * chunks) * stages + turn % stages


@functools.lru_cache(maxsize=64)
def _passes(micro_batches: int, stages: int, chunks: int, stage: int) -> tuple[Pass, ...]:
    """The passes of a stage; kept, because every stage's schedule asks for those of all."""
    width = stages * chunks
    total = -(-micro_batches // stages) * width
    warm_up = min(2 * (stages - stage - 1) + width - stages, total)
    found = []
    for turn in range(total + warm_up):
        if turn < total:
            chunk, batch = chunk_and_batch(turn, stages, chunks)
            if batch < micro_batches:
                found.append(Pass(ForwardPass, chunk, batch))
        if turn >= warm_up:
            chunk, batch = chunk_and_batch(turn - warm_up, stages, chunks)
            if batch < micro_batches:
                found.append(Pass(BackwardPass, chunks - 1 - chunk, batch))
    return tuple(found)
