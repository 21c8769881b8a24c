"""Every pipeline schedule is proved for 1 to 8 stages and 1 to 32 micro-batches, and what is spoilt is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ScheduleError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check import check
from mpispeed.pipe.schedule import (
    InferenceSchedule,
    InterleavedSchedule,
    PipeSchedule,
    TrainSchedule,
    ZeroBubbleSchedule,
    build,
)
from mpispeed.pipe.timeline import expected_bubble, times
from tests.helpers.schedules import Written, copied

KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
#: an instruction and one that needs it, on the same micro-batch
NEEDED = [
    (do.LoadMicroBatch, do.ForwardPass),
    (do.RecvActivation, do.ForwardPass),
    (do.ForwardPass, do.SendActivation),
    (do.ForwardPass, do.BackwardPass),
    (do.ForwardPass, do.BackwardInput),
    (do.SendActivation, do.RecvGrad),
    (do.RecvGrad, do.BackwardPass),
    (do.RecvGrad, do.BackwardInput),
    (do.BackwardPass, do.SendGrad),
    (do.BackwardInput, do.SendGrad),
    (do.BackwardInput, do.BackwardWeight),
]


def all_of(name: str, micro_batches: int, stages: int, chunks: int) -> list[PipeSchedule]:
    if name == "inference":
        return [InferenceSchedule(micro_batches, stages, stage, chunks) for stage in range(stages)]
    return [build(name, micro_batches, stages, stage, chunks) for stage in range(stages)]


def batch_sizes(chunks: int) -> range:
    """1 to 32 micro-batches; 1 to 16 for a third chunk."""
    return range(1, 17 if chunks > 2 else 33)


def has_closed_form(name: str, micro_batches: int, stages: int) -> bool:
    return {"interleaved": micro_batches % stages == 0, "zb-h1": micro_batches >= stages or stages == 1}.get(name, True)


@pytest.mark.parametrize(
    ("name", "chunks", "stages"),
    [(name, chunks, stages) for name, chunks in KINDS for stages in range(1 + (chunks > 1), 9)],
)
def test_proved(name: str, chunks: int, stages: int) -> None:
    for micro_batches in batch_sizes(chunks):
        schedules = all_of(name, micro_batches, stages, chunks)
        proof = check(schedules)
        assert proof.is_training
        assert proof.messages == 2 * micro_batches * (stages * chunks - 1)
        assert proof.survives_barriers
        assert proof.survives_blocking_sends or name in ("interleaved", "zb-h1")
        live = [stage.peak_live for stage in proof.stages]
        assert all(most <= stage.buffers for most, stage in zip(live, proof.stages, strict=True))
        assert live == live_activations(name, micro_batches, stages, chunks)
        bubbles = set(times(schedules).bubbles)
        wanted = expected_bubble(name, micro_batches, stages, chunks)
        assert (wanted is not None) == has_closed_form(name, micro_batches, stages)
        assert wanted is None or bubbles == {wanted}


def live_activations(name: str, micro_batches: int, stages: int, chunks: int) -> list[int]:
    """What is alive at most on each stage, in micro-batches of a chunk."""
    if name == "gpipe":
        return [micro_batches] * stages
    if name == "interleaved":
        return [interleaved_live(micro_batches, stages, stage, chunks) for stage in range(stages)]
    return [min(stages - stage, micro_batches) for stage in range(stages)]


def interleaved_live(micro_batches: int, stages: int, stage: int, chunks: int) -> int:
    """Counted in the order for the next multiple of the stages, without the micro-batches that are not there."""
    group = stages * chunks
    total = -(-micro_batches // stages) * group
    is_there = [turn // group * stages + turn % stages < micro_batches for turn in range(total)]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    ahead = [sum(is_there[: warm_up + done + 1]) - sum(is_there[:done]) for done in range(total)]
    return max(ahead)


@pytest.mark.parametrize(("chunks", "stages"), [(chunks, stages) for chunks in (1, 2) for stages in range(chunks, 9)])
def test_inference_is_proved(chunks: int, stages: int) -> None:
    for micro_batches in batch_sizes(chunks):
        proof = check(all_of("inference", micro_batches, stages, chunks))
        assert not proof.is_training
        assert proof.messages == micro_batches * (stages * chunks - 1)
        assert proof.survives_barriers
        assert proof.survives_blocking_sends or chunks > 1
        assert {stage.buffers for stage in proof.stages} == {2 * chunks}


numbers = st.integers(0, 12)


@given(
    st.sampled_from(["1f1b", "gpipe", "interleaved"]), st.integers(2, 6), st.integers(1, 4), numbers, numbers, numbers
)
def test_bubbles_at_any_times(name: str, stages: int, rounds: int, forward: int, inputs: int, weights: int) -> None:
    chunks = 2 if name == "interleaved" else 1
    passes = (forward, inputs, weights + 1)
    timeline = times(all_of(name, rounds * stages, stages, chunks), *passes)
    assert set(timeline.bubbles) == {expected_bubble(name, rounds * stages, stages, chunks, *passes)}


@given(st.integers(2, 6), st.integers(0, 12), numbers, numbers, numbers)
def test_zero_bubble_at_any_times(stages: int, more: int, forward: int, inputs: int, weights: int) -> None:
    passes = (forward + 1, inputs, weights)
    timeline = times(all_of("zb-h1", stages + more, stages, 1), *passes)
    wanted = expected_bubble("zb-h1", stages + more, stages, 1, *passes)
    assert (wanted is None) == (weights > min(forward + 1, inputs))
    assert wanted is None or set(timeline.bubbles) == {wanted}


# -- what is spoilt ----------------------------------------------------------------------------------------------------

shapes = st.tuples(st.sampled_from([*KINDS, ("inference", 1), ("inference", 2)]), st.integers(1, 9), st.integers(2, 5))


def changeable(shape: tuple[tuple[str, int], int, int]) -> list[Written]:
    (name, chunks), micro_batches, stages = shape
    return [copied(one) for one in all_of(name, micro_batches, stages, chunks)]


def refuses(schedules: list[Written]) -> bool:
    with pytest.raises(ScheduleError, match="stage "):
        check(schedules)
    return True


@given(shapes, st.data())
def test_nothing_can_be_left_out(shape: tuple[tuple[str, int], int, int], data: st.DataObject) -> None:
    schedules = changeable(shape)
    check(schedules)
    one = data.draw(st.sampled_from(schedules))
    step = data.draw(st.sampled_from([step for step in one.lists if step]))
    del step[data.draw(st.integers(0, len(step) - 1))]
    assert refuses(schedules)


@given(shapes, st.data())
def test_nothing_can_be_done_twice(shape: tuple[tuple[str, int], int, int], data: st.DataObject) -> None:
    schedules = changeable(shape)
    one = data.draw(st.sampled_from(schedules))
    step = data.draw(st.sampled_from([step for step in one.lists if step]))
    place = data.draw(st.integers(0, len(step) - 1))
    step.insert(place, step[place])
    assert refuses(schedules)


@given(shapes, st.data())
def test_nothing_can_come_before_what_it_needs(shape: tuple[tuple[str, int], int, int], data: st.DataObject) -> None:
    schedules = changeable(shape)
    one = data.draw(st.sampled_from(schedules))
    flat = [instruction for step in one.lists for instruction in step]
    of_passes = [place for place, found in enumerate(flat) if isinstance(found, do.BufferOpInstruction)]
    pairs = [
        (first, second)
        for first in of_passes
        for second in of_passes
        if (type(flat[first]), type(flat[second])) in NEEDED
        and (flat[first].chunk, flat[first].micro_batch) == (flat[second].chunk, flat[second].micro_batch)
    ]
    first, second = data.draw(st.sampled_from(pairs))
    assert first < second
    flat[first], flat[second] = flat[second], flat[first]
    one.lists = [flat]
    assert refuses(schedules)


@given(shapes, st.data())
def test_messages_cannot_change_places(shape: tuple[tuple[str, int], int, int], data: st.DataObject) -> None:
    schedules = changeable(shape)
    kinds = (do.SendActivation, do.SendGrad, do.RecvActivation, do.RecvGrad)
    places = [
        (one, step, place)
        for one in schedules
        for step in one.lists
        for place, found in enumerate(step)
        if isinstance(found, kinds)
    ]
    one, step, place = data.draw(st.sampled_from(places))
    alike = [
        (other, at)
        for found, other, at in places
        if found is one and type(other[at]) is type(step[place]) and other[at] != step[place]
    ]
    if alike:
        other, at = data.draw(st.sampled_from(alike))
        step[place], other[at] = other[at], step[place]
        assert refuses(schedules)


@given(shapes, st.data())
def test_no_buffer_can_be_spared(shape: tuple[tuple[str, int], int, int], data: st.DataObject) -> None:
    schedules = changeable(shape)
    one = data.draw(st.sampled_from(schedules))
    ids = {found.buffer_id for step in one.lists for found in step if isinstance(found, do.BufferOpInstruction)}
    one._buffers = max(ids)
    assert refuses(schedules)


class _Tight1F1B(TrainSchedule):
    def num_pipe_buffers(self) -> int:
        return min(self.stages - self.stage_id, self.micro_batches) - 1


class _TightZeroBubble(ZeroBubbleSchedule):
    @property
    def _counts(self) -> list[int]:
        return [min(self.stages - self.stage_id, self.micro_batches) - 1]


class _TightInterleaved(InterleavedSchedule):
    @property
    def _counts(self) -> list[int]:
        whole = InterleavedSchedule(self.micro_batches, self.stages, self.stage_id, self.num_chunks)._counts
        return [max(1, count - 1) for count in whole]


@given(st.sampled_from([_Tight1F1B, _TightZeroBubble, _TightInterleaved]), st.integers(2, 9), st.integers(2, 6))
def test_buffers_cannot_be_shared(kind: type[PipeSchedule], micro_batches: int, stages: int) -> None:
    """One buffer less, and micro-batches dealt to those that are left."""
    whole = {_Tight1F1B: TrainSchedule, _TightZeroBubble: ZeroBubbleSchedule}.get(kind, InterleavedSchedule)
    schedules = [whole(micro_batches, stages, stage) for stage in range(stages)]
    check(schedules)
    schedules[0] = kind(micro_batches, stages, 0)
    with pytest.raises(ScheduleError, match=r"stage 0, .* into a buffer that still holds micro-batch"):
        check(schedules)
