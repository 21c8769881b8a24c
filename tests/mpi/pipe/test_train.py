"""A GPT of 8 blocks learns the same in every layout of ranks, by every schedule, wherever its states rest.

`MPISPEED_MATRIX=full` (`make matrix`) trains every combination instead of every pair.
"""

from dataclasses import replace

import pytest
import torch

from tests.helpers.covering import IS_FULL, in_turn, on_ranks
from tests.helpers.pipes import (
    BATCH,
    Case,
    Layout,
    PlainRun,
    all_weights,
    batch,
    every_case,
    pairwise_cases,
    plain,
    train,
)
from tests.zoo import same_bits

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 20 if IS_FULL else 10
# fp32: the order of sums differs. bf16: besides, what ranks and stages send each other is rounded.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-3}


def on_its_ranks(cases):
    return [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks)) for case in cases]


@pytest.mark.parametrize("case", on_its_ranks(every_case() if IS_FULL else pairwise_cases()))
def test_losses_are_those_of_one_process(case):
    losses, norms = plain(STEPS, case.dtype)
    engine = case.engine()
    found = train(engine, [0])
    assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=BOUNDS[case.dtype])
    found += train(engine, range(1, STEPS))
    assert found == pytest.approx(losses, rel=BOUNDS[case.dtype])
    assert len(set(engine.mesh.world.comm.gather_objects(tuple(found)))) == 1
    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * BATCH)
    engine.destroy()


# -- schedules only change the order ---------------------------------------------------------------------------------

SCHEDULED = [
    Case(Layout(*sizes), stage=stage, is_tied=is_tied, is_per_micro=is_per_micro)
    for sizes, stage, is_tied, is_per_micro in (
        ((2, 1, 1), 0, False, False),
        ((2, 1, 1), 3, True, False),
        ((3, 1, 1), 1, True, False),
        ((4, 1, 1), 0, True, False),
        ((2, 1, 2), 2, True, True),
        ((2, 1, 2), 3, False, False),
        ((2, 2, 1), 2, True, False),
    )
]


@pytest.mark.parametrize("case", on_its_ranks(SCHEDULED))
def test_all_schedules_give_the_same_bits(case):
    results = {}
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1"):
        engine = replace(case, schedule=schedule, clip=0.0).engine()
        results[schedule] = train(engine, range(3)), all_weights(engine), engine.get_global_grad_norm()
        engine.destroy()
    losses, weights, norm = results.pop("1f1b")
    for schedule, (other_losses, other_weights, other_norm) in results.items():
        assert other_losses == losses, schedule
        assert other_weights.keys() == weights.keys()
        same_bits(other_weights, weights, schedule)
        assert other_norm == pytest.approx(norm, rel=1e-6), schedule  # sums of squares by stage have another order


# -- fp16 ------------------------------------------------------------------------------------------------------------

FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


@pytest.mark.parametrize(("stage", "at"), on_ranks([0, 2, 3], ["first", "last"], ranks=(2, 3, 4)))
def test_an_overflow_on_one_stage_skips_the_step_on_all(stage, at, world):
    engine = Case(Layout(world.size, 1, 1), stage=stage).engine(fp16=FP16, bf16={"enabled": False})
    train(engine, range(1))
    before = all_weights(engine)
    hook = None
    if engine.stage_id == {"first": 0, "last": world.size - 1}[at]:
        param = next(engine.module.parameters())
        hook = param.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    train(engine, [1])
    if hook is not None:
        hook.remove()
    assert not engine.was_step_applied()
    assert engine.skipped_steps == 1
    assert engine.optimizer.loss_scale == 2**7
    after = all_weights(engine)
    same_bits(after, before)
    losses = train(engine, [1, 2])
    assert engine.was_step_applied()
    assert engine.skipped_steps == 1
    reference = PlainRun()
    expected = [reference.step(*batch(step))[0] for step in (0, 1, 2)]
    assert losses == pytest.approx(expected[1:], rel=1e-3)
    engine.destroy()


# -- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", in_turn(["1f1b", "zb-h1"]))
def test_the_number_of_micro_batches_can_change(schedule, world):
    size = world.size
    engine = Case(Layout(size, 1, 1), schedule).engine(train_batch_size=8, gradient_accumulation_steps=2)
    reference = PlainRun()
    for step, wanted in enumerate((8, 16, 4, 12)):
        engine.set_train_batch_size(wanted)
        assert engine.gradient_accumulation_steps() == wanted // 4
        assert engine.train_batch_size() == wanted
        assert train(engine, [step]) == pytest.approx([reference.step(*batch(step, wanted))[0]], rel=1e-5)
    assert engine.global_samples == 8 + 16 + 4 + 12
    engine.destroy()
