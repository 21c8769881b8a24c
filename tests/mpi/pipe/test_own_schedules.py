"""Schedules that a script brings along: they are proved, then they train."""

import pytest

from mpispeed.base.errors import ConfigError, ScheduleError
from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule import GPipeSchedule, InferenceSchedule, TrainSchedule
from tests.helpers.pipes import BATCH, Case, Layout, PlainRun, batch, train

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3)]


@pytest.fixture
def engine(world):
    """As many stages as ranks."""
    made = Case(Layout(world.size, 1, 1)).engine()
    yield made
    made.destroy()


class OneByOne(TrainSchedule):
    """A micro-batch goes through all stages and back before the next one begins."""

    def steps(self):
        where = lambda micro: (0, 0, micro)  # noqa: E731
        for micro in range(self.micro_batches):
            parts = [do.LoadMicroBatch(*where(micro))] if self.is_first_stage or self.is_last_stage else []
            parts += [] if self.is_first_stage else [do.RecvActivation(*where(micro))]
            parts.append(do.ForwardPass(*where(micro)))
            if not self.is_last_stage:
                parts += [do.SendActivation(*where(micro)), do.RecvGrad(*where(micro))]
            parts.append(do.BackwardPass(*where(micro)))
            parts += [] if self.is_first_stage else [do.SendGrad(*where(micro))]
            if micro == self.micro_batches - 1:
                parts += [do.ReduceTiedGrads(), do.ReduceGrads(), do.OptimizerStep()]
            yield parts

    def num_pipe_buffers(self):
        return 1


def test_a_schedule_of_ones_own(engine):
    engine.set_schedule(OneByOne)
    reference = PlainRun()
    assert train(engine, [0]) == pytest.approx([reference.step(*batch(0))[0]], rel=1e-5)
    engine.set_schedule(None, name="gpipe")
    assert train(engine, [1]) == pytest.approx([reference.step(*batch(1))[0]], rel=1e-5)
    with pytest.raises(ConfigError, match="interleaved"):
        engine.set_schedule(None, name="interleaved")


class FewBuffers(GPipeSchedule):
    """Holds all micro-batches in one buffer."""

    def num_pipe_buffers(self):
        return 1


class MoreIds(TrainSchedule):
    """Names a buffer that is not there."""

    def _buffer_idx(self, micro_batch):
        return 5 + micro_batch


class OneMore(TrainSchedule):
    """Takes a micro-batch that is not there."""

    def __init__(self, micro_batches, stages, stage):
        super().__init__(micro_batches + 1, stages, stage)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (FewBuffers, r"has 1 buffers \(num_pipe_buffers\)"),
        (MoreIds, r"stage 0, step 0, .*buffers \(num_pipe_buffers\)"),
        (OneMore, r"it is of \d+ micro-batches and 1 chunks per stage, and the PipelineModule has 1"),
        (InferenceSchedule, "it has no backward passes"),
    ],
)
def test_a_schedule_that_does_not_hold(engine, schedule, words):
    with pytest.raises(ScheduleError, match=rf"engine.set_schedule was given, for \d+ micro-batches, .*{words}"):
        engine.set_schedule(schedule)
    assert train(engine, [0]) == pytest.approx([PlainRun().step(*batch(0))[0]], rel=1e-5)


class Forgetful(OneByOne):
    """The first stage does not send the activation of micro-batch `forgotten`."""

    forgotten = 1

    def steps(self):
        for parts in super().steps():
            yield [one for one in parts if one != do.SendActivation(0, 0, self.forgotten) or self.stage]


class ForgetfulLater(Forgetful):
    """Holds for a few micro-batches."""

    forgotten = 4


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2, 3)
def test_a_send_that_is_missing_is_told_to_all_stages(engine):
    words = r"stage 0, step \d, RecvGrad.* waits for ever .*stage 1, which waits too; stage 1, step \d, RecvActivation"
    with pytest.raises(ScheduleError, match=rf"ranks 0, 1.* of \d: .*{words}"):
        engine.set_schedule(Forgetful)
    steps = engine.gradient_accumulation_steps()
    assert steps <= ForgetfulLater.forgotten
    engine.set_schedule(ForgetfulLater)
    reference = PlainRun()
    assert train(engine, [0]) == pytest.approx([reference.step(*batch(0))[0]], rel=1e-5)
    engine.set_train_batch_size(2 * BATCH)
    with pytest.raises(ScheduleError, match=rf"for {2 * steps} micro-batches, .*{words}"):
        train(engine, [1])
    engine.set_train_batch_size(BATCH)
    assert train(engine, [1]) == pytest.approx([reference.step(*batch(1))[0]], rel=1e-5)
