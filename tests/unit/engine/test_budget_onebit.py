"""Predictions for 1-bit optimizers: errors, momenta and masters, and what a step of every phase sends."""

import pytest
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.config.load import validate
from mpispeed.engine.estimate.budget import gather_inputs, predict
from mpispeed.engine.estimate.feasibility import Limit, Setup, judge
from mpispeed.engine.estimate.host_budget import predict_host
from mpispeed.mesh import sim
from mpispeed.optim.choice import build
from mpispeed.plan.plan import make_plan
from mpispeed.store.placement import Tier
from tests.helpers.onebit_budget import compare
from tests.helpers.onebit_training import NAMES, PRECISIONS, settings
from tests.unit.engine.simulated import engine_on
from tests.unit.engine.test_budget import PSI, on_meta, plain
from tests.zoo.models import Mlp

KINDS = {"OneBitAdam": 2, "OneBitLamb": 2, "ZeroOneAdam": 4}
EACH = pytest.mark.parametrize("name", NAMES)


def check_engine(name, ranks, stage, accumulation, dtype, *, has_nodes=False, is_overlapped=False):
    source = settings(name, stage, accumulation, **PRECISIONS[dtype])
    source["zero_optimization"]["overlap_comm"] = is_overlapped
    models = [Mlp() for _ in range(ranks)]

    def job(world):
        engine = engine_on(world, source, models[world.rank])
        assert (engine.parts.plan.placing.hops is not None) == has_nodes
        seen = compare(engine, Mlp())
        engine.destroy()
        return len(seen)

    assert sim.run(ranks, job) == [KINDS[name]] * ranks


@EACH
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 3), ("bf16", 1)])
def test_prediction_is_what_engines_measure(name, ranks, stage, dtype, accumulation):
    check_engine(name, ranks, stage, accumulation, dtype)


@EACH
@pytest.mark.parametrize("stage", [0, 1])
def test_exchanges_beside_backward_change_nothing(name, stage):
    check_engine(name, 2, stage, 3, "bf16", is_overlapped=True)


@EACH
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("ranks", "dtype"), [(4, "bf16"), (6, "fp32")])
def test_prediction_for_nodes_of_several_ranks(name, stage, ranks, dtype, monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    check_engine(name, ranks, stage, 1, dtype, has_nodes=True)


# -- formulas --------------------------------------------------------------------------------------------------------


def plan_of(name, stage, ranks, *, node=None, dtype="bf16", **more):
    source = {**settings(name, stage, **PRECISIONS[dtype], **more), "train_batch_size": ranks}
    return make_plan(validate(source).config, ranks, torch.float32, ranks_per_node=node)


def budget_of(name, stage, ranks, **more):
    return predict(gather_inputs(plan_of(name, stage, ranks, **more), on_meta(plain)))


@EACH
@pytest.mark.parametrize("stage", [0, 1])
def test_bytes_by_formula(name, stage):
    ranks, units = 16, 16
    budget = budget_of(name, stage, ranks)
    assert budget.bytes_of("1-bit errors") == 4 * PSI + 4 * PSI // ranks
    is_cut = name == "OneBitAdam" and stage == 1
    assert budget.bytes_of("1-bit momentum") == (4 * PSI if is_cut else 0)
    assert budget.bytes_of("optimizer state") == (
        8 * PSI // ranks if is_cut else (8 if name == "OneBitAdam" else 12) * PSI
    )
    assert budget.bytes_of("masters") == (4 * PSI // ranks if is_cut else 4 * PSI)
    coded = 2 * (ranks - 1) * (PSI // (8 * ranks) + 4 * units)
    gathered = 2 * PSI * (ranks - 1) // ranks if is_cut else 0
    norm = 2 * 72 * 8 * (ranks - 1) // ranks  # an all-reduce of 68 limbs and 4 counts
    found = {phase.name: phase.bytes for phase in budget.phases}
    if name == "ZeroOneAdam":
        assert found["local"] == norm
        assert found["1-bit meeting"] == found["1-bit gradients"] == coded + norm
    else:
        assert found["1-bit momenta"] == coded + gathered + norm
        assert ("first 1-bit momenta" in found) == is_cut
    assert found["full precision"] == budget.sent_bytes() == 4 * PSI * (ranks - 1) // ranks + norm


def test_a_node_sends_what_one_rank_would():
    alone, nodes = (budget_of("OneBitAdam", 0, ranks, node=node) for ranks, node in ((4, None), (16, 4)))
    between = [
        sum(row.bytes for row in budget.phases[1].sent if row.verb == "compressed_all_reduce")
        for budget in (alone, nodes)
    ]
    scales = 2 * 3 * 4 * 16  # in front of each message
    assert between[0] - scales == 4 * (between[1] - scales)
    assert nodes.bytes_of("1-bit errors") == alone.bytes_of("1-bit errors") // 4


def test_masters_of_their_own_in_fp32():
    assert budget_of("ZeroOneAdam", 0, 2, dtype="fp32").bytes_of("masters") == 4 * PSI
    assert budget_of("OneBitLamb", 0, 2, dtype="fp32").bytes_of("masters") == 0


@EACH
def test_the_host_budget_knows_them(name):
    plan, model = plan_of(name, 1, 2), on_meta(plain)
    rule, _ = build(plan.optimizer_name, plan.optimizer_params)
    rows = predict_host(plan, model)
    assert rows == predict_host(plan, model, slots=rule.state_names, rule=rule)
    assert rows["1-bit errors"] == 6 * PSI
    assert "1-bit errors" not in predict_host(plan, model, slots=("exp_avg",))  # an optimizer given in code
    budget = budget_of(name, 1, 2)
    assert sum(rows.values()) == budget.tier_bytes(Tier.DEVICE) + budget.tier_bytes(Tier.HOST)


def test_a_checkpoint_that_is_copied_has_errors_and_local_states():
    copies = {"checkpoint": {"async_save": True}}
    ranks = 4
    adam, zero_one = (budget_of(name, 0, ranks, **copies) for name in ("OneBitAdam", "ZeroOneAdam"))
    errors = 4 * PSI + 4 * PSI // ranks
    assert adam.bytes_of("checkpoint copy") == 12 * PSI // ranks + errors
    assert zero_one.bytes_of("checkpoint copy") == 16 * PSI // ranks + 8 * PSI + errors


def test_what_engines_refuse_is_refused():
    with pytest.raises(ConfigError, match="use stage 0 or 1"):
        budget_of("OneBitAdam", 2, 2)
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        budget_of("OneBitAdam", 1, 2, data_types={"grad_accum_dtype": "bf16"})


def test_no_change_names_a_stage_that_is_refused():
    config = validate({**settings("OneBitAdam", 0, **PRECISIONS["bf16"]), "train_batch_size": 8}).config
    verdicts = [
        judge(Setup(config, 8), on_meta(plain), torch.float32, [Limit("a test", size)]) for size in (1 << 60, 1)
    ]
    assert verdicts[0].is_go
    assert verdicts[1].change is None
