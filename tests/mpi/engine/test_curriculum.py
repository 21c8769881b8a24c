"""`curriculum_learning`, the older form: the length grows, and training is that of plain torch on cut batches."""

import pytest
import torch

from mpispeed import checkpointing
from mpispeed.base.errors import PipelineError, UsageError
from mpispeed.curriculum import truncate
from tests.helpers.covering import on_ranks
from tests.helpers.pipes import Case, Layout, PlainRun, micro_batches
from tests.helpers.pipes import batch as pipe_batch
from tests.zoo import same_bits
from tests.zoo.models import Block, TinyLM, batches
from tests.zoo.training import WARM, config, own_part, start, train_averaged, train_warm, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3, 4)]
BATCH = 36
LENGTHS = [2, 4, 6, 8, 8]
"""Of the first steps."""


def growth(kind="fixed_linear", **more):
    """The section: from 2 to 8 in 4 steps."""
    numbers = {"total_curriculum_step": 4, "difficulty_step": 2} if kind == "fixed_linear" else {}
    return {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 8, "schedule_type": kind,
        "schedule_config": numbers, **more,
    }  # fmt: skip


class Growing(TinyLM):
    """Takes the first `curriculum_seqlen` tokens to predict the next ones of, and notes each length."""

    def __init__(self, **more):
        super().__init__(**more)
        self.lengths = []

    def forward(self, tokens, curriculum_seqlen=None):
        self.lengths.append(curriculum_seqlen)
        return super().forward(tokens if curriculum_seqlen is None else tokens[:, : curriculum_seqlen + 1])


def started(stage=1, accumulation=1, section=None, model=None, **more):
    settings = config(stage, BATCH, accumulation, curriculum_learning=section or growth(), **{**WARM, **more})
    return start(settings, model or Growing())


@pytest.mark.parametrize("stage", on_ranks([0, 1, 2, 3]))
def test_training_is_that_of_plain_torch_on_cut_batches(stage):
    """The length is constant within a global batch, and evaluations between have the whole batch."""
    data = batches(5, BATCH)
    expected = train_warm(TinyLM(), [truncate(x, length + 1) for x, length in zip(data, LENGTHS, strict=True)])
    engine = started(stage, 3)
    found = []
    for x in data:
        found += train_averaged(engine, [x])
        engine.eval()
        with torch.no_grad():
            engine(x)
        engine.train()
    assert found == pytest.approx(expected, rel=1e-5)
    assert engine.module.lengths == [each for length in LENGTHS for each in (length, length, length, None)]
    assert engine.curriculum_enabled_legacy()
    assert engine.curriculum_params_legacy()["max_difficulty"] == 8
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 8
    engine.destroy()


def test_a_run_goes_on_with_the_same_bits(mpi_tmp_path):
    """Inside of the growth, with a function that only remembers where it is by the step."""
    section = growth("custom", max_difficulty=8)
    data = batches(6, BATCH)

    def lengths(step):
        return 2 + step if step < 4 else 8

    whole = started(2, section=section)
    whole.set_custom_curriculum_learning_schedule({"seqlen": lengths})
    expected = train_averaged(whole, data)
    assert whole.module.lengths == [3, 4, 5, 8, 8, 8]
    first = started(2, section=section)
    first.set_custom_curriculum_learning_schedule(lengths)
    losses = train_averaged(first, data[:2])
    first.save_checkpoint(str(mpi_tmp_path))
    other = started(2, section=section, model=Growing(seed=99))
    other.load_checkpoint(str(mpi_tmp_path))
    assert other.curriculum_scheduler_legacy.get_current_difficulty() == 4
    other.set_custom_curriculum_learning_schedule({"seqlen": lengths})
    assert losses + train_averaged(other, data[2:]) == expected
    same_bits(weights(other), weights(whole))
    for engine in (whole, first, other):
        engine.destroy()


def test_functions_need_their_schedules():
    engine = started(section=growth("custom"))
    with pytest.raises(UsageError, match=r"call engine\.set_custom_curriculum_learning_schedule"):
        train_averaged(engine, batches(1, BATCH))
    with pytest.raises(UsageError, match=r"no schedule of rarity; its schedules are of seqlen"):
        engine.set_custom_curriculum_learning_schedule({"rarity": int})
    with pytest.raises(UsageError, match=r"takes a dict .*; schedules of type custom in this run: seqlen"):
        engine.set_custom_curriculum_learning_schedule(8)
    engine.destroy()
    engine = started()
    with pytest.raises(UsageError, match="schedule_type of seqlen is fixed_linear, and functions are for type custom"):
        engine.set_custom_curriculum_learning_schedule({"seqlen": int})
    engine.destroy()
    engine = started(section={"enabled": False})
    with pytest.raises(UsageError, match="no schedule of seqlen; curriculum learning is off in the config"):
        engine.set_custom_curriculum_learning_schedule({"seqlen": int})
    assert not engine.curriculum_enabled_legacy()
    with pytest.raises(AttributeError):
        _ = engine.curriculum_scheduler_legacy
    engine.destroy()


def test_other_difficulties_pass_nothing(mpi_tmp_path, comm):
    """A script reads them; monitors have them all the same."""
    monitor = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "run"}
    engine = started(section=growth(curriculum_type="noise"), model=TinyLM(), csv_monitor=monitor)
    found = []
    for x in batches(4, BATCH):
        train_averaged(engine, [x])
        found.append(engine.curriculum_scheduler_legacy.get_current_difficulty())
    assert found == LENGTHS[:4]
    engine.destroy()
    comm.barrier()
    (path,) = mpi_tmp_path.rglob("*curriculum_noise*")
    points = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert [(int(x), float(y)) for x, y in points] == [(36 * n, y) for n, y in enumerate(found, 1)]


def test_a_model_without_the_argument(caplog, comm):
    engine = started(model=TinyLM())
    assert caplog.text.count("forward of TinyLM has no such argument") == (comm.rank == 0)
    with pytest.raises(TypeError, match="curriculum_seqlen"):
        train_averaged(engine, batches(1, BATCH))
    engine.eval()
    engine(batches(1, BATCH)[0])
    engine.destroy()


class Recomputed(Block):
    def forward(self, x):
        return checkpointing.checkpoint(super().forward, x)


def test_kept_activations_of_growing_lengths():
    """One buffer of equal slots, made anew when lengths grow, while the loss of the step before is still there."""
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}
    found = []
    for block, more in ((Block, {}), (Recomputed, {"activation_checkpointing": section})):
        engine, loss, losses = started(model=Growing(block=block), **more), None, []
        for x in batches(5, BATCH):
            loss = engine(*own_part(engine, x))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append(losses)
        engine.destroy()
    assert found[0] == found[1]


# -- pipelines -----------------------------------------------------------------------------------------------------

LAYOUTS = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 1, 2)}


def pipeline(comm, section=None, **more):
    pipe, model, data = LAYOUTS[comm.size]
    engine = Case(Layout(pipe, model, data), **more).engine(curriculum_learning=section or growth())

    def cut(pair):
        length = engine.curriculum_scheduler_legacy.get_current_difficulty()
        return truncate(pair, length) if engine.training else pair

    engine.set_batch_fn(cut)
    return engine


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_cuts_its_batches(stage, comm):
    """Messages between stages follow the length; an evaluation between has whole batches."""
    plain, engine = PlainRun(), pipeline(comm, stage=stage)
    for step, length in enumerate(LENGTHS):
        x, y = pipe_batch(step)
        expected, _ = plain.step(x[:, :length], y[:, :length])
        assert float(engine.train_batch(iter(micro_batches(engine, step)))) == pytest.approx(expected, rel=1e-5)
        assert engine.curriculum_scheduler_legacy.get_current_difficulty() == length
        engine.reset_activation_shape()  # as scripts do; of no effect
        with torch.no_grad():
            expected = float(plain.model(x, y))
        assert float(engine.eval_batch(iter(micro_batches(engine, step)))) == pytest.approx(expected, rel=1e-5)
    engine.destroy()


@pytest.mark.ranks(1, 2, 4)
def test_a_function_that_fails_on_one_rank_ends_the_batch_on_all(comm):
    engine = pipeline(comm, growth("custom"))

    def lengths(step):
        if step == 2 and comm.rank == comm.size - 1 and not failed:
            failed.append(step)
            raise LookupError("planted")
        return 2 * step

    failed = []
    engine.set_custom_curriculum_learning_schedule({"seqlen": lengths})
    engine.train_batch(iter(micro_batches(engine, 0)))
    with pytest.raises(LookupError if comm.rank == comm.size - 1 else PipelineError, match="planted"):
        engine.train_batch(iter(micro_batches(engine, 1)))
    engine.train_batch(iter(micro_batches(engine, 1)))
    assert engine.global_steps == 2
    engine.destroy()
