"""The instructions of the schedules, step by step, and what users may build from them."""

import copy
import pickle

import pytest

from mpispeed.base.errors import ConfigError, ScheduleError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check import check
from mpispeed.pipe.schedule import (
    SCHEDULES,
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    InterleavedSchedule,
    OrderedSchedule,
    Pass,
    PipeSchedule,
    TrainSchedule,
    ZeroBubbleSchedule,
    build,
)
from tests.helpers.schedules import short

TRAIN = {
    (4, 1, 0): "L0 F0 | B0 | L1 F1 | B1 | L0 F0 | B0 | L1 F1 | B1 RT R O",
    (4, 2, 0): "L0 F0 | SA0 | L1 F1 | RG0 SA1 B0 | L0 F0 | RG1 SA0 B1 | L1 F1 | RG0 SA1 B0 | - | RG1 B1 RT R O",
    (4, 2, 1): (
        "- | RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | SG1 RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | SG1 RT R O"
    ),
    (4, 3, 0): (
        "L0 F0 | SA0 | L1 F1 | SA1 | L2 F2 | RG0 SA2 B0 | L0 F0 | RG1 SA0 B1 | - | RG2 B2 | - | RG0 B0 RT R O"
    ),
    (4, 3, 1): (
        "- | RA0 F0 | SA0 | RA1 F1 | RG0 SA1 B0 | SG0 RA0 F0 | RG1 SA0 B1 | SG1 RA1 F1 | RG0 SA1 B0 | SG0 | "
        "RG1 B1 | SG1 RT R O"
    ),
    (4, 3, 2): (
        "- | - | RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | SG1 RA0 L0 F0 | B0 | SG0 RA1 L1 F1 | B1 | SG1 | RT R O"
    ),
}  # fmt: skip
INFER = {
    (4, 2, 0): "L0 F0 | L1 SA0 F1 | L0 SA1 F0 | L1 SA0 F1 | SA1",
    (4, 2, 1): "- | L0 RA0 F0 | L1 RA1 F1 | L0 RA0 F0 | L1 RA1 F1",
    (4, 3, 1): "- | RA0 F0 | RA1 SA0 F1 | RA0 SA1 F0 | RA1 SA0 F1 | SA1",
    (4, 3, 2): "- | - | L0 RA0 F0 | L1 RA1 F1 | L0 RA0 F0 | L1 RA1 F1",
}


@pytest.mark.parametrize("shape", TRAIN, ids=str)
def test_training_instructions(shape):
    assert short(TrainSchedule(*shape)) == TRAIN[shape]


@pytest.mark.parametrize("shape", INFER, ids=str)
def test_inference_instructions(shape):
    assert short(InferenceSchedule(*shape)) == INFER[shape]


def test_data_parallel_instructions():
    assert short(DataParallelSchedule(3, 1, 0)) == "L0 F0 B0 | L0 F0 B0 | L0 F0 B0 R O"
    assert DataParallelSchedule(3).num_pipe_buffers() == 1
    check([DataParallelSchedule(3)])
    with pytest.raises(ConfigError, match=r"stages is 2; .* serves only 1"):
        DataParallelSchedule(3, 2, 0)


def test_new_schedules_instructions():
    assert short(GPipeSchedule(2, 2, 1)) == "- | L0 RA0 F0 | L1 RA1 F1 | B0 SG0 | B1 SG1 | RT R O"
    zero_bubble = (
        "- | RA0 F0 SA0 | RA1 F1 SA1 | - | RG0 I0 SG0 | RA0 F0 SA0 | RG1 I1 SG1 | W0 | RG0 I0 SG0 | W1 | W0 RT R O"
    )
    assert short(ZeroBubbleSchedule(3, 3, 1)) == zero_bubble
    # Chunk 0 has buffers 0 and 1, chunk 1 has buffer 2.
    assert short(InterleavedSchedule(2, 2, 1)) == (
        "- | RA0 F0 SA0 | RA1 F1 SA1 | L2 RA2 F2 | B2 SG2 | L2 RA2 F2 | B2 SG2 | RG0 B0 SG0 | RG1 B1 SG1 | RT R O"
    )


def test_buffers():
    assert [TrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 2]
    assert [TrainSchedule(1, 4, stage).num_pipe_buffers() for stage in range(4)] == [2, 2, 2, 2]
    assert [ZeroBubbleSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 1]
    assert [GPipeSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [8] * 4
    assert [InferenceSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [2] * 4
    assert InferenceSchedule(8, 4, 0, chunks=3).num_pipe_buffers() == 6


# -- what DeepSpeed's own tests ask ------------------------------------------------------------------------------------


def kinds(step):
    return [type(one) for one in step]


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_inference_with_one_stage(count):
    steps = list(InferenceSchedule(count, 1, 0))
    assert len(steps) == count
    for step in steps:
        assert kinds(step) == [do.LoadMicroBatch, do.ForwardPass]
        assert step[0].buffer_id == step[1].buffer_id


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_training_with_one_stage(count):
    steps = list(TrainSchedule(count, 1, 0))
    assert len(steps) == 2 * count
    for place, step in enumerate(steps[:-1]):
        assert kinds(step) == ([do.BackwardPass] if place % 2 else [do.LoadMicroBatch, do.ForwardPass])
    assert len(steps[-1]) == 4


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_inference_on_the_first_of_three_stages(count):
    steps = list(InferenceSchedule(count, 3, 0))
    assert kinds(steps[0]) == [do.LoadMicroBatch, do.ForwardPass]
    assert all(
        sorted(kinds(step), key=str) == [do.ForwardPass, do.LoadMicroBatch, do.SendActivation]
        for step in steps[1:count]
    )
    assert kinds(steps[count]) == [do.SendActivation]
    assert steps[count + 1 :] == [[]]


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_inference_on_the_middle_stage(count):
    for place, step in enumerate(InferenceSchedule(count, 3, 1)):
        found = kinds(step)
        assert do.LoadMicroBatch not in found
        is_active = 1 <= place <= count
        assert found.count(do.RecvActivation) == found.count(do.ForwardPass) == is_active
        assert found.count(do.SendActivation) == (2 <= place <= count + 1)


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_inference_on_the_last_stage_sends_nothing(count):
    for place, step in enumerate(InferenceSchedule(count, 3, 2)):
        wanted = {do.LoadMicroBatch, do.RecvActivation, do.ForwardPass} if place >= 2 else set()
        assert set(kinds(step)) == wanted


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_training_on_first_and_last_stage(count):
    first, last = (TrainSchedule(count, 3, stage) for stage in (0, 2))
    assert len(list(first)) == len(list(last)) == 2 * (count + 2)
    assert not {do.SendGrad, do.RecvActivation} & {kind for step in first for kind in kinds(step)}
    assert not {do.SendActivation, do.RecvGrad} & {kind for step in last for kind in kinds(step)}
    for schedule in (first, last):
        ids = {one.buffer_id for step in schedule for one in step if hasattr(one, "buffer_id")}
        assert ids <= set(range(schedule.num_pipe_buffers()))


# -- instructions ------------------------------------------------------------------------------------------------------


def test_instructions_are_values():
    assert do.ForwardPass(3) == do.ForwardPass(buffer_id=3)
    assert do.ForwardPass(3) != do.BackwardPass(3)
    assert do.ForwardPass(3) != do.ForwardPass(3, micro_batch=1)
    assert do.ForwardPass(3) != (3,)
    assert len({do.ForwardPass(1), do.ForwardPass(1), do.ForwardPass(2), do.OptimizerStep(), do.OptimizerStep()}) == 3
    one = do.PipeInstruction(weight=2, why="x")
    assert (one.weight, one.why, one.name) == (2, "x", "PipeInstruction")
    assert hash(one) == hash(do.PipeInstruction(why="x", weight=2))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_instructions_print_like_deepspeeds():
    assert repr(do.OptimizerStep()) == "OptimizerStep()"
    assert repr(do.ForwardPass(0, micro_batch=4)) == "ForwardPass(buffer_id=0)"
    assert repr(do.SendGrad(5, 1, 2)) == "SendGrad(buffer_id=5, chunk=1, micro_batch=2)"
    assert do.LoadMicroBatch(1).kwargs == {"buffer_id": 1, "chunk": 0, "micro_batch": None}


def test_instructions_are_frozen():
    one = do.ForwardPass(3)
    with pytest.raises(AttributeError, match="frozen: buffer_id cannot be set"):
        one.buffer_id = 4
    with pytest.raises(AttributeError, match="frozen: chunk cannot be deleted"):
        del one.chunk
    one.kwargs["buffer_id"] = 7
    assert one.buffer_id == 3


# -- schedules as a whole ----------------------------------------------------------------------------------------------


def test_properties():
    one = build("Interleaved", 8, 4, 3, chunks=2)
    assert (one.stage, one.num_stages, one.num_micro_batches, one.num_chunks) == (3, 4, 8, 2)
    assert (one.is_first_stage, one.is_last_stage) == (False, True)
    assert [one.virtual_stage(chunk) for chunk in (0, 1)] == [3, 7]
    assert [one.has_last_layers(chunk) for chunk in (0, 1)] == [False, True]
    assert repr(one) == "InterleavedSchedule(8, 4, 3, chunks=2)"
    assert build("1f1b", 8, 4, 0).num_chunks == 1


def test_schedules_are_found_by_name():
    assert set(SCHEDULES) == {"1f1b", "gpipe", "interleaved", "zb-h1"}
    with pytest.raises(ConfigError, match='Did you mean "gpipe"'):
        build("g-pipe", 4, 2, 0)
    with pytest.raises(ConfigError, match="'zb-h1' with 2 chunks per stage: it has one; use 'interleaved'"):
        build("zb-h1", 4, 2, 0, chunks=2)
    with pytest.raises(ConfigError, match="chunks=1 would only keep more activations"):
        build("interleaved", 4, 2, 0)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, 2, 0), "micro_batches is 0; expected at least 1"),
        ((1, 0, 0), "stages is 0; expected at least 1"),
        ((1, 2, 2), "stage_id is 2; expected 0 to 1 for 2 stages"),
        ((1, 2, -1), "stage_id is -1"),
    ],
)
def test_numbers_out_of_range(shape, said):
    with pytest.raises(ConfigError, match=f"TrainSchedule: {said}"):
        TrainSchedule(*shape)


@pytest.mark.parametrize("kind", [InterleavedSchedule, InferenceSchedule])
def test_chunks_need_stages(kind):
    with pytest.raises(ConfigError, match=r"2 chunks on 1 stage; .* at least 2 stages"):
        kind(4, 1, 0, chunks=2)


class Eager(PipeSchedule):
    """A user's own, written with what DeepSpeed's schedules are written with."""

    def steps(self):
        for batch in range(self.micro_batches):
            buffer_id = self._buffer_idx(batch)
            parts = [do.LoadMicroBatch(buffer_id)] if self.is_first_stage or self.is_last_stage else []
            if self._valid_stage(self.prev_stage):
                parts.append(do.RecvActivation(buffer_id))
            parts.append(do.ForwardPass(buffer_id))
            if self._valid_stage(self.next_stage):
                parts.append(do.SendActivation(buffer_id))
            yield parts


def test_a_users_own_schedule():
    proof = check([Eager(3, 3, stage) for stage in range(3)])
    assert not proof.is_training
    assert proof.survives_blocking_sends
    assert proof.survives_barriers


class Backwards(OrderedSchedule):
    """Only an order: the last micro-batch first."""

    def passes(self, stage):
        order = range(self.micro_batches - 1, -1, -1)
        yield from (Pass(do.ForwardPass, 0, batch) for batch in range(self.micro_batches))
        yield from (Pass(do.BackwardPass, 0, batch) for batch in order)


def test_a_users_own_order():
    proof = check([Backwards(3, 2, stage) for stage in range(2)])
    assert [stage.peak_live for stage in proof.stages] == [3, 3]
    assert proof.survives_barriers


class Crossed(OrderedSchedule):
    """Stage 0 wants its first gradient before it gives the second input; stage 1 the second input first."""

    def passes(self, stage):
        kinds = [do.ForwardPass, do.BackwardPass, do.ForwardPass, do.BackwardPass]
        batches = [0, 0, 1, 1] if stage == 0 else [1, 1, 0, 0]
        yield from (Pass(kind, 0, batch) for kind, batch in zip(kinds, batches, strict=True))


def test_an_order_that_cannot_be():
    with pytest.raises(ScheduleError, match=r"stage 0 at pass 1, BackwardPass of .* 0, chunk 0; stage 1 at pass 0"):
        list(Crossed(2, 2, 0))
