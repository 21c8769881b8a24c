"""1-bit optimizers in pipelines and on slices of layers: copies of a weight stay equal, data ranks meet."""

from dataclasses import replace

import pytest
import torch

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.optim.exchange import Exchange
from tests.helpers import pipes
from tests.helpers.covering import in_turn
from tests.helpers.onebit_training import NAMES, is_same_on_ranks, kind_of, states_of
from tests.helpers.pipes import Case, Layout, all_weights, train
from tests.helpers.tensor import whole_parameters
from tests.zoo import same_bits

pytestmark = pytest.mark.mpi(min_size=1)
EACH = pytest.mark.parametrize("name", NAMES)
STEPS = 6
LR = {"OneBitAdam": 2e-3, "ZeroOneAdam": 2e-3, "OneBitLamb": 1e-2}
SHARED = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
# Variance steps 1 and 2, a coded gradient, then local steps of which 4 and 6 meet.
ZERO_ONE = {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2}
SHAPE = pipes.gpt.Shape(layers=2, heads=2, width=32, block=12)


def optimizer(name):
    own = ZERO_ONE if name == "ZeroOneAdam" else {"freeze_step": 3}
    return {"optimizer": {"type": name, "params": {**SHARED, **own, "lr": LR[name]}}}


def of(*layouts):
    cases = [Case(Layout(*sizes), is_tied=is_tied, stage=stage) for sizes, is_tied, stage in layouts]
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks)) for case in cases]
    )


@pytest.fixture(autouse=True)
def _two_blocks(monkeypatch):
    monkeypatch.setattr(pipes, "SHAPE", SHAPE)


@EACH
@of(((2, 1, 1), True, 0), ((2, 1, 2), True, 0), ((3, 1, 1), True, 0))
def test_copies_of_tied_weights_stay_equal_and_data_ranks_meet(name, case):
    engine, losses = case.engine(**optimizer(name)), []
    for step in range(1, STEPS + 1):
        losses += train(engine, [0])
        weights = all_weights(engine)  # which are equal wherever they are
        assert is_same_on_ranks(engine) or kind_of(engine, step) is Exchange.NOTHING
    assert "tied_modules.bytes.weight" in weights
    assert {kind_of(engine, step) for step in range(1, STEPS + 1)} > {Exchange.GRADIENT}
    assert losses[-1] < losses[0]
    sent = engine.mesh.comm_trace.total_bytes("compressed_all_reduce")
    assert (sent > 0) == (case.layout.data > 1)
    engine.destroy()


@EACH
@of(((1, 2, 2), False, 0))
def test_whole_weights_of_cut_layers_stay_equal_on_all_slices(name, case):
    engine, losses = case.engine(**optimizer(name)), []
    for step in range(1, STEPS + 1):
        losses += train(engine, [0])
        whole_parameters(engine.mesh["model"], engine.module)  # fails where copies differ
        assert is_same_on_ranks(engine) or kind_of(engine, step) is Exchange.NOTHING
    assert losses[-1] < losses[3] < losses[0]
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam"])
def test_schedules_change_no_bit(name):
    found = []
    for schedule in ("1f1b", "zb-h1"):
        case = replace(Case(Layout(2, 1, 2), is_tied=True, clip=0.0), schedule=schedule)
        engine = case.engine(**optimizer(name))
        losses = train(engine, range(STEPS))
        found.append((losses, states_of(engine)))
        engine.destroy()
    (losses, states), (others, theirs) = found
    assert losses == others
    same_bits(theirs, states)


@pytest.mark.ranks(4)
def test_stages_that_sum_late_change_no_bit():
    found = []
    for stage in (1, 2, 3):
        section = {"stage": stage, "stage3_param_persistence_threshold": 0}  # the same units at all stages
        case, more = Case(Layout(2, 1, 2), stage=stage, clip=0.0), optimizer("OneBitAdam")
        engine = case.engine(reduction="ordered", zero_optimization=section, **more)
        found.append((train(engine, range(STEPS)), all_weights(engine)))
        engine.destroy()
    (losses, weights), *others = found
    for other_losses, other_weights in others:
        assert other_losses == losses
        same_bits(other_weights, weights)


@pytest.mark.ranks(4)
def test_cut_masters_are_refused_where_updates_are_local():
    for stage in (2, 3):
        with pytest.raises(ConfigError, match=f"ZeroOneAdam lets gradients stay local .*stage {stage}"):
            Case(Layout(2, 1, 2), stage=stage).engine(zero_allow_untested_optimizer=True, **optimizer("ZeroOneAdam"))


@pytest.mark.parametrize("name", in_turn(NAMES, ranks=(2, 4)))
def test_a_stage_may_have_nothing_to_train(name, world):
    case = Case(Layout(2, 1, world.size // 2))
    module = case.module()
    if module.stage_id == 1:
        module.requires_grad_(False)
    engine = mpispeed.initialize(model=module, config=case.settings(**optimizer(name)))[0]
    before = all_weights(engine)
    losses = train(engine, [0] * STEPS)
    assert losses[-1] < losses[0]
    moved = {key.split(".")[0] for key, value in all_weights(engine).items() if not torch.equal(value, before[key])}
    assert moved
    assert is_same_on_ranks(engine)
    engine.destroy()


@pytest.mark.parametrize("name", in_turn(NAMES, ranks=(2, 4)))
def test_a_mask_that_fits_on_one_stage_only_is_refused_on_all(name, world):
    case = Case(Layout(2, 1, world.size // 2))
    module = case.module()
    params = list(module.parameters())
    masked = params[:1] if module.stage_id == 0 else []
    groups = [
        {"params": masked, "exp_avg_mask": torch.ones(3)},
        {"params": [p for p in params if not any(p is q for q in masked)]},
    ]
    with pytest.raises(ConfigError, match="exp_avg_mask of parameter group 0"):
        mpispeed.initialize(model=module, config=case.settings(**optimizer(name)), model_parameters=groups)


@pytest.mark.parametrize("name", in_turn(NAMES, ranks=(4, 2)))
def test_an_overflow_on_one_rank_skips_on_all_stages(name, world):
    case = Case(Layout(2, 1, world.size // 2), is_tied=True)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = case.engine(fp16=fp16, bf16={"enabled": False}, **optimizer(name))
    for step in range(1, STEPS + 1):
        if step in (3, 4, 5):
            before, hook = states_of(engine), None
            if world.comm.rank == world.size - 1:
                param = next(engine.module.parameters())
                hook = param.register_hook(lambda grad: torch.full_like(grad, float("inf")))
            train(engine, [step])
            if hook is not None:
                hook.remove()
            assert not engine.was_step_applied()
            after = states_of(engine)
            same_bits(after, before)
        train(engine, [step])
        assert engine.was_step_applied()
        all_weights(engine)
    assert engine.skipped_steps == 3
    assert is_same_on_ranks(engine)
    engine.destroy()
