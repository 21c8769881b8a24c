"""What `check` proves and refuses."""

from collections import Counter

import pytest

from mpispeed.base.errors import ScheduleError, UsageError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.check import check
from mpispeed.pipe.schedule import InferenceSchedule, InterleavedSchedule, TrainSchedule, build
from tests.helpers.schedules import Written, copied, short, written

GOOD = ("L0 F0 SA0 | RG0 B0 | RT R O", "RA0 L0 F0 B0 SG0 | - | RT R O")


def all_of(name, micro_batches, stages, chunks=1):
    return [build(name, micro_batches, stages, stage, chunks) for stage in range(stages)]


def refused(schedules):
    with pytest.raises(ScheduleError) as caught:
        check(schedules)
    return str(caught.value)


def test_what_is_proved():
    proof = check(all_of("1f1b", 8, 4))
    assert (proof.is_training, proof.messages) == (True, 2 * 3 * 8)
    assert (proof.survives_blocking_sends, proof.survives_barriers) == (True, True)
    assert [stage.stage for stage in proof.stages] == [0, 1, 2, 3]
    assert [stage.buffers for stage in proof.stages] == [4, 3, 2, 2]
    assert [stage.peak_live for stage in proof.stages] == [4, 3, 2, 1]
    assert [stage.peak_weights for stage in proof.stages] == [0] * 4


def test_what_other_schedules_hold():
    zero_bubble = check(all_of("zb-h1", 8, 4))
    assert [stage.peak_live for stage in zero_bubble.stages] == [4, 3, 2, 1]
    assert [stage.peak_weights for stage in zero_bubble.stages] == [1, 2, 3, 4]
    assert [stage.peak_held for stage in zero_bubble.stages] == [4] * 4
    assert [stage.peak_live for stage in check(all_of("gpipe", 8, 4)).stages] == [8] * 4
    # Warm-up of 2 (P - s - 1) + (v - 1) P passes, and one more.
    assert [stage.peak_live for stage in check(all_of("interleaved", 8, 4, 2)).stages] == [11, 9, 7, 5]


@pytest.mark.parametrize(
    ("name", "chunks", "survives"), [("gpipe", 1, True), ("zb-h1", 1, False), ("interleaved", 2, False)]
)
def test_blocking_sends(name, chunks, survives):
    assert check(all_of(name, 8, 4, chunks)).survives_blocking_sends is survives


def test_barriers():
    assert check(written(1, *GOOD)).survives_barriers is True
    spread = ("L0 F0 SA0 | - | RG0 B0 | RT R O", "- | RA0 L0 F0 B0 SG0 | - | RT R O")
    assert check(written(1, *spread)).survives_barriers is True
    late = ("L0 F0 | SA0 RG0 B0 | - | RT R O", "RA0 L0 F0 B0 SG0 | - | - | RT R O")
    assert check(written(1, *late)).survives_barriers is False
    uneven = ("L0 F0 SA0 RG0 B0 | RT R O", "RA0 L0 F0 B0 SG0 RT R O")
    assert check(written(1, *uneven)).survives_barriers is False


SENDS, RECEIVES = (do.SendActivation, do.SendGrad), (do.RecvActivation, do.RecvGrad)


def channel(schedule, one):
    """Kind of a message and the virtual stage that sends it; None if the instruction is no message."""
    if not isinstance(one, SENDS + RECEIVES):
        return None
    here = schedule.virtual_stage(one.chunk)
    is_gradient = isinstance(one, (do.SendGrad, do.RecvGrad))
    return is_gradient, here + (isinstance(one, RECEIVES) * (1 if is_gradient else -1))


def in_all_orders(schedules):
    """Every state that ranks can come to, by search: (ends, most messages of each stage under way, all done)."""
    acts = [[(one, channel(schedule, one)) for step in schedule for one in step] for schedule in schedules]
    whole = tuple(map(len, acts))
    seen, todo, ends, most = set(), [(0,) * len(acts)], set(), [0] * len(acts)
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        done = [act for own, place in zip(acts, state, strict=True) for act in own[:place] if act[1]]
        flow = Counter(where for one, where in done if isinstance(one, SENDS))
        flow.subtract(where for one, where in done if isinstance(one, RECEIVES))
        for stage in range(len(acts)):
            mine = sum(count for (_, virtual), count in flow.items() if virtual % len(acts) == stage)
            most[stage] = max(most[stage], mine)
        nexts = [
            (*state[:stage], place + 1, *state[stage + 1 :])
            for stage, place in enumerate(state)
            if place < whole[stage]
            and not (isinstance(acts[stage][place][0], RECEIVES) and not flow[acts[stage][place][1]])
        ]
        todo += nexts
        ends |= set() if nexts else {state}
    return ends, most, whole


@pytest.mark.parametrize(
    ("name", "micro_batches", "stages", "chunks"),
    [("1f1b", 3, 2, 1), ("1f1b", 2, 3, 1), ("gpipe", 3, 2, 1), ("zb-h1", 3, 2, 1), ("interleaved", 2, 2, 2)],
)
def test_one_order_proves_all(name, micro_batches, stages, chunks):
    schedules = all_of(name, micro_batches, stages, chunks)
    ends, most, whole = in_all_orders(schedules)
    assert ends == {whole}
    assert [stage.peak_messages for stage in check(schedules).stages] == most


def test_deadlock_names_all_who_wait():
    crossed = written(1, "L0 F0 RG0 SA0 B0 R O", "RA0 L0 F0 B0 SG0 R O")
    ends, _, whole = in_all_orders(crossed)
    assert whole not in ends
    said = refused(crossed)
    assert "stage 0, step 0, RecvGrad(buffer_id=0): waits for ever for a message, the gradient from stage 1" in said
    assert "stage 1, step 0, RecvActivation(buffer_id=0): waits for ever" in said
    assert said.count("which waits too") == 2


REFUSED = [
    # a message without a receive, and the other way round
    (1, "L0 F0 SA0 SA0 | RG0 B0 R O", GOOD[1], "stage 0, step 0, SendActivation.* is sent on already"),
    (1, "L0 F0 SA0 | RG0 B0 R O", "RA0 L0 F0 | B0 R O", r"RecvGrad\(buffer_id=0\): waits for ever .* come to its end"),
    (1, "L0 F0 SA0 | B0 R O", GOOD[1], "stage 0, step 1, BackwardPass.* not given its gradient yet"),
    (1, "L0 F0 SA0 | RG0 B0 R O", "L0 F0 B0 SG0 R O", "stage 1, step 0, ForwardPass.* not received yet"),
    # buffers
    (2, "L0 F0 SA0 L0 F0 SA0 | RG0 B0 R O", GOOD[1], "micro-batch 1 into a buffer that still holds micro-batch 0"),
    (1, "L0 F0 SA0 | RG1 B0 R O", GOOD[1], r"stage 0, step 1, RecvGrad\(buffer_id=1\): this stage has 1 buffers"),
    (2, "L0 F0 SA1", "-", "stage 0, step 0, SendActivation.*: the buffer is empty"),
    (1, "L0 SA0 F0", "-", "is not run forward yet"),
    (1, "L0 F0 SA0 | RG0 B0 R O", "RA0 L0 F0 SG0 B0 R O", "stage 1, step 0, SendGrad.* not run backward yet"),
    (1, "L0 L0 F0", "-", "into a buffer that still holds micro-batch 0"),
    # passes
    (2, "L0 F0 SA0 | RG0 B0", "RA0 L0 F0 B0 SG0", "stage 0: micro-batch 1 of chunk 0 is never run forward"),
    (1, "L0 F0 SA0", "RA0 L0 F0 I0 SG0", "SendGrad.*: the gradient of micro-batch 0 is never received"),
    (1, "L0 F0 SA0 RG0 I0", "RA0 L0 F0 B0 SG0", "never taken into the gradients of the weights"),
    (1, "L0 F0 SA0 RG0 W0", "RA0 L0 F0 B0 SG0", "no gradient of an input waits for that of its weights"),
    (1, "L0 F0 F0", "-", "is run forward already"),
    (2, "L0 F0 SA0 L1 F1 SA1 RG0 I0 RG1 I1 W1", "RA0 L0 F0 B0 SG0 RA0 L0 F0 B0 SG0", "is of micro-batch 0 in buffer 0"),
    # roles
    (1, "L0 F0 SA0", "RA0 F0", "stage 1, step 0, ForwardPass.* not loaded yet"),
    (1, "RA0 F0 SA0", "-", "nobody stands before the first layers"),
    (1, "L0 F0 SA0", "RA0 L0 F0 SA0", "nobody stands behind the last layers"),
    (1, "L0 F0 SA0", "RA0 L0 F0 RG0", "nobody stands behind the last layers"),
    # the end
    (1, "L0 F0 SA0 | RG0 R B0 O", GOOD[1], "ReduceGrads.*: not all backward passes are done"),
    (1, GOOD[0], "RA0 L0 F0 B0 SG0 | RT R", r"stage 1: .* without OptimizerStep"),
    (1, GOOD[0], "RA0 L0 F0 B0 SG0 | R O", "stage 1: .* stage 0 with .*ReduceTiedGrads.*; all have to take part"),
    (1, "L0 F0 SA0 | RG0 B0 R RT O", GOOD[1], "ReduceTiedGrads.*: it comes after ReduceGrads"),
    (1, "L0 F0 SA0 O", "RA0 L0 F0", "OptimizerStep.*: not all backward passes are done"),
]  # fmt: skip


@pytest.mark.parametrize(("micro_batches", "first", "second", "said"), REFUSED)
def test_refused(micro_batches, first, second, said):
    with pytest.raises(ScheduleError, match=said):
        check(written(micro_batches, first, second))


def test_middle_stages_do_not_load():
    three = ("L0 F0 SA0", "RA0 L0 F0 SA0", "RA0 L0 F0")
    assert "stage 1, step 0, LoadMicroBatch(buffer_id=0): only the first and the last" in refused(written(1, *three))
    assert not check(written(1, three[0], "RA0 F0 SA0", three[2])).is_training


def test_buffers_belong_to_one_chunk():
    schedules = [copied(one) for one in all_of("interleaved", 2, 2, 2)]
    step = schedules[1].lists[3]
    assert short(schedules[1]).split(" | ")[3] == "L2 RA2 F2"
    step[:] = [type(one)(0, 1, one.micro_batch) for one in step]
    said = refused(schedules)
    assert "LoadMicroBatch(buffer_id=0, chunk=1, micro_batch=0): buffer 0 belongs to chunk 0" in said
    step[0] = do.LoadMicroBatch(2, 5)
    assert "this stage has 2 chunks, from 0" in refused(schedules)


def test_instructions_that_name_the_wrong_micro_batch():
    schedules = [copied(one) for one in all_of("1f1b", 2, 2)]
    assert schedules[1].lists[1][0] == do.RecvActivation(0, 0, 0)
    schedules[1].lists[1][0] = do.RecvActivation(0, 0, 1)
    said = refused(schedules)
    assert "RecvActivation(buffer_id=0) of micro-batch 1: it says micro-batch 1, but by its order it is about 0" in said


def test_schedules_belong_together():
    assert "no schedules were given" in refused([])
    assert "schedule 0 of 1 has" in refused(all_of("1f1b", 4, 2)[:1])
    assert "schedule 1 of 2 has" in refused([TrainSchedule(4, 2, 0), TrainSchedule(3, 2, 1)])
    assert "schedule 0 of 2 has" in refused([TrainSchedule(4, 2, 1), TrainSchedule(4, 2, 0)])
    assert "schedule 1 of 2 has" in refused([InferenceSchedule(4, 2, 0), InterleavedSchedule(4, 2, 1)])
    assert refused([InferenceSchedule(4, 2, 0), TrainSchedule(4, 2, 1)])


def test_instructions_of_unknown_kind():
    class Cheer(do.PipeInstruction):
        pass

    with pytest.raises(UsageError, match=r"stage 0, step 0, Cheer\(\): its kind is unknown"):
        check([Written(1, 1, 0, [[Cheer()]])])
