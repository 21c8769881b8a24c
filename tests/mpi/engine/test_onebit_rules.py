"""1-bit optimizers with clipping, overflow, masks, dead elements and groups, and what they are refused with."""

import math

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.native import exact_sum
from mpispeed.optim.exchange import Exchange
from mpispeed.sharding.grad_shards import MOST_NOTES
from mpispeed.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.helpers.covering import in_turn
from tests.helpers.onebit_training import (
    BATCH,
    CLOSE,
    FREEZE,
    NAMES,
    PARAMS,
    PRECISIONS,
    engine_of,
    is_same_on_ranks,
    kind_of,
    reference_run,
    run_step,
    samples,
    settings,
    states_of,
)
from tests.zoo import same_bits
from tests.zoo.models import Mlp, Words
from tests.zoo.training import own_part, start, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2)]
EACH = pytest.mark.parametrize("name", NAMES)
ADAM_STAGES = pytest.mark.parametrize("stage", [0, 1])


# -- the norm and clipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", in_turn(NAMES, ranks=(2, 3, 4, 1)))
def test_local_gradients_are_clipped_by_the_root_mean_square_of_their_norms(name, world):
    engine, comm, clip, steps = engine_of(name, 0, 1, gradient_clipping=0.2), world.comm, 0.2, 13
    run = (name, engine.parts.table.units, comm.size, 1, steps, clip)
    data, course, norms = comm.share(reference_run(*run) if comm.rank == 0 else None)
    for step, (batch, expected, norm) in enumerate(zip(data, course, norms, strict=True), start=1):
        run_step(engine, batch)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
        for key, ours in weights(engine).items():
            assert (ours.double() - expected[comm.rank][key]).abs().max() < CLOSE * ours.abs().max(), (step, key)
    assert min(norms) > clip  # every step was clipped
    engine.destroy()


# -- overflow ----------------------------------------------------------------------------------------------------------

# Of 0/1 Adam a coded gradient, the first local step, a local one without a meeting, and one with one.
BAD_STEPS = {
    "OneBitAdam": (FREEZE + 1, FREEZE + 3),
    "OneBitLamb": (FREEZE + 1, FREEZE + 3),
    "ZeroOneAdam": (3, 9, 11, 12),
}


def steps_with_failures(engine, bad, at):
    """12 updates; before those numbered in `at` one with a gradient that is `bad` on the last rank only."""
    data = samples(12)
    for step, batch in enumerate(data, start=1):
        if step in at:
            before, scale, norm = states_of(engine), engine.optimizer.cur_scale, engine.get_global_grad_norm()
            params = {key: value.clone() for key, value in engine.module.state_dict().items()}
            run_step(engine, batch, bad if engine.global_rank == engine.world_size - 1 else 1.0)
            assert not engine.was_step_applied()
            same_bits(states_of(engine), before)
            same_bits(dict(engine.module.state_dict()), params)
            assert engine.get_global_grad_norm() == norm
            assert engine.optimizer.cur_scale == (scale / 2 if engine.optimizer.dynamic_loss_scale else scale)
        run_step(engine, batch)
        assert engine.was_step_applied()


@pytest.mark.ranks(1, 2)
@EACH
@pytest.mark.parametrize(("dtype", "bad"), [("fp16", math.inf), ("bf16", math.nan), ("fp32", math.nan)])
def test_what_is_not_finite_on_one_rank_leaves_no_trace(name, dtype, bad):
    found = []
    for at in (BAD_STEPS[name], ()):
        engine = engine_of(name, 0, 1, **PRECISIONS[dtype])
        steps_with_failures(engine, bad, at)
        assert engine.skipped_steps == len(at)
        found.append(states_of(engine))
        engine.destroy()
    # The loss scale halves meanwhile, which changes no bit of what is not denormal.
    if dtype != "fp16":
        same_bits(*found)


@pytest.mark.ranks(2, 4)
def test_overflow_with_cut_states():
    engine = engine_of("OneBitAdam", 1, 1, **PRECISIONS["fp16"])
    steps_with_failures(engine, math.inf, BAD_STEPS["OneBitAdam"])
    assert is_same_on_ranks(engine)
    engine.destroy()


# -- masks, dead elements, groups --------------------------------------------------------------------------------------


def groups_of(model, **more):
    """The first weight with `more`, and all else."""
    first = model.first.weight
    return [{"params": [first], **more}, {"params": [p for p in model.parameters() if p is not first]}]


@EACH
@pytest.mark.parametrize("is_flat", [False, True])
def test_masked_rows_have_no_momentum(name, is_flat, world):
    model, mask = Mlp(), torch.ones(32, 8)
    mask[:3] = 0.0
    given = mask.reshape(-1) if is_flat else mask
    engine = start(settings(name), model, model_parameters=groups_of(model, exp_avg_mask=given))
    checked = 0
    for step, batch in enumerate(samples(12), start=1):
        run_step(engine, batch)
        momentum = safe_get_full_optimizer_state(engine.module.first.weight, "exp_avg")
        if kind_of(engine, step) in (Exchange.MOMENTUM, Exchange.DRIFT):
            assert torch.equal(momentum, momentum * mask)
            assert (momentum[3:] != 0).all()
            checked += 1
        elif step == 1:
            assert (momentum[:3] != 0).any()
    assert checked >= 3
    engine.destroy()


@EACH
@pytest.mark.parametrize("mask", [torch.ones(8, 32), torch.ones(8), [1.0] * 256], ids=["turned", "row", "list"])
def test_masks_of_another_shape_are_refused_and_leave_nothing_behind(name, mask):
    model = Mlp()
    with pytest.raises(ConfigError, match=r"exp_avg_mask of parameter group 0 .*first\.weight.*\(32, 8\)"):
        start(settings(name), model, model_parameters=groups_of(model, exp_avg_mask=mask))
    check_that_it_can_train(model)


def check_that_it_can_train(model):
    engine = engine_of("OneBitAdam", 0, 1, model)
    run_step(engine, samples(1)[0])
    assert engine.was_step_applied()
    engine.destroy()


def words(step, size=BATCH, highest=6):
    return (torch.randint(0, highest, (size,), generator=torch.Generator().manual_seed(step)),)


def words_settings(name, stage=0, **more):
    found = settings(name, stage, **more)
    found["optimizer"] = {"type": name, "params": {**PARAMS[name], "weight_decay": 0.0}}
    return found


@EACH
@pytest.mark.parametrize("stage", [0, 1])
def test_rows_without_a_gradient_in_the_warm_up_stay(name, stage):
    engine = start(words_settings(name, stage), Words())
    weight = engine.module.embed.weight
    before = weight.detach().clone()
    for step in range(1, 16):
        highest = 12 if step > 11 else 6  # later they have gradients
        loss = run_step(engine, words(step, highest=highest))
        assert loss < 3
    assert torch.equal(weight[6:], before[6:])
    assert ((weight[:6] - before[:6]).abs().amax(1) > 1e-3).all()
    assert (weight - before).abs().max() < 2
    engine.destroy()


@ADAM_STAGES
def test_groups_that_do_not_freeze_go_on_with_both_moments(stage, world):
    model = Words()
    groups = [{"params": [model.embed.weight], "non_freeze": True}, {"params": list(model.out.parameters())}]
    engine = start(words_settings("OneBitAdam", stage), model, model_parameters=groups)
    for step in range(1, FREEZE + 6):
        params = {"embed": model.embed.weight, "out": model.out.weight}
        old = {
            key: [safe_get_full_optimizer_state(p, s) for s in ("exp_avg", "exp_avg_sq")] for key, p in params.items()
        }
        loss = engine(*own_part(engine, words(step, highest=12 if step > FREEZE else 6)))
        engine.backward(loss)
        grad = safe_get_full_grad(model.embed.weight)
        world.comm.all_reduce(grad, "avg")  # in the warm-up it is equal on all ranks already
        engine.step()
        momentum, square = (safe_get_full_optimizer_state(model.embed.weight, s) for s in ("exp_avg", "exp_avg_sq"))
        torch.testing.assert_close(momentum, 0.9 * old["embed"][0] + 0.1 * grad, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(square, 0.99 * old["embed"][1] + 0.01 * grad.square(), rtol=1e-4, atol=1e-10)
        assert torch.equal(safe_get_full_optimizer_state(model.out.weight, "exp_avg_sq"), old["out"][1]) == (
            step > FREEZE
        )
        assert is_same_on_ranks(engine)
    engine.destroy()


# -- what comes together with them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", [2, 3])
def test_cut_gradients_are_refused(name, stage):
    model = Mlp()
    with pytest.raises(ConfigError, match=rf"{name} lets gradients stay local .*stage {stage} .*use stage 0 or 1"):
        engine_of(name, stage, 1, model)
    check_that_it_can_train(model)


@EACH
def test_models_and_accumulators_of_other_dtypes_are_refused(name):
    model = Mlp().double()
    with pytest.raises(ConfigError, match=rf"{name} works on masters and gradients in float32, found torch.float64"):
        engine_of(name, 0, 1, model)
    check_that_it_can_train(model.float())
    model = Mlp()
    with pytest.raises(ConfigError, match=r"found torch\.bfloat16.*grad_accum_dtype"):
        engine_of(name, 1, 1, model, data_types={"grad_accum_dtype": "bf16"}, **PRECISIONS["bf16"])
    check_that_it_can_train(model)


@EACH
@pytest.mark.parametrize("stage", [0, 1])
def test_own_gradients_can_be_read_and_set_while_they_are_local(name, stage, world):
    engine = engine_of(name, stage, 1)
    for batch in samples(FREEZE + 4):
        run_step(engine, batch)
    assert kind_of(engine, FREEZE + 5) is not Exchange.GRADIENT
    plain, params = Mlp(), dict(engine.module.named_parameters())
    plain.load_state_dict(weights(engine))
    batch = own_part(engine, samples(1, seed=9)[0])
    plain(*batch).backward()
    engine.backward(engine(*batch))
    for key, p in plain.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(params[key]), p.grad, rtol=1e-4, atol=1e-6)
    wanted = torch.full((4, 31), 0.25 * (1 + world.comm.rank))
    safe_set_full_grad(params["last.weight"], wanted)
    assert torch.equal(safe_get_full_grad(params["last.weight"]), wanted)
    torch.testing.assert_close(safe_get_full_grad(params["last.bias"]), plain.last.bias.grad, rtol=1e-4, atol=1e-6)
    engine.step()
    squares = sum(float(p.grad.double().square().sum()) for key, p in plain.named_parameters() if key != "last.weight")
    total = torch.tensor(squares + float(wanted.double().square().sum()), dtype=torch.float64)
    world.comm.all_reduce(total, "avg")
    assert engine.get_global_grad_norm() == pytest.approx(math.sqrt(float(total)), rel=1e-4)
    engine.destroy()


@pytest.mark.ranks(1, 2, 3)
@ADAM_STAGES
def test_a_momentum_that_is_set_is_the_one_that_is_mixed(stage, world):
    engine = engine_of("OneBitAdam", stage, 1)
    data = samples(FREEZE + 4)
    for batch in data[:-1]:
        run_step(engine, batch)
    for param in engine.module.parameters():
        safe_set_full_optimizer_state(param, torch.full(param.shape, 3.0), "exp_avg")
    for errors in engine.parts.optimization.exchange.coder.errors.values():
        errors.clear()
    run_step(engine, data[-1])
    for param in engine.module.parameters():
        assert (safe_get_full_optimizer_state(param, "exp_avg") > 1.0).all()
    assert is_same_on_ranks(engine)
    engine.destroy()


@EACH
@pytest.mark.parametrize("stage", [0, 1])
def test_loaded_weights_are_the_common_ones_of_the_next_step(name, stage, world):
    engine = engine_of(name, stage, 1)
    data = samples(12)
    for batch in data[:11]:  # 0/1 Adam is between two meetings then
        run_step(engine, batch)
    given = Mlp(seed=5).state_dict()
    engine.load_module_state_dict(given)
    same_bits(weights(engine), dict(given))
    run_step(engine, data[11])
    assert is_same_on_ranks(engine)
    for key, value in weights(engine).items():
        assert (value - given[key]).abs().max() < 0.1, key
        assert not torch.equal(value, given[key]), key
    engine.destroy()


@EACH
@pytest.mark.parametrize("way", ["no_sync", "by hand"])
def test_boundaries_by_hand_and_no_sync_change_no_bit(name, way, world):
    engines = [engine_of(name, 0, 3), engine_of(name, 0, 1, train_batch_size=BATCH // 3)]
    counted, other = engines
    for batch in samples(12):
        run_step(counted, batch)
        parts = [own_part(counted, batch, micro) for micro in range(3)]
        for micro, part in enumerate(parts):
            is_last = micro == 2
            if way == "no_sync" and not is_last:
                with other.no_sync():
                    other.backward(other(*part) / 3)
                continue
            other.set_gradient_accumulation_boundary(is_last)
            other.backward(other(*part) / 3)
            other.step()
    same_bits(states_of(counted), states_of(other))
    for engine in engines:
        engine.destroy()


class Gated(nn.Module):
    """The side branch is used on the ranks that ask for it; the frozen layer never learns."""

    def __init__(self):
        super().__init__()
        self.net, self.side, self.uses_side = Mlp(), nn.Linear(8, 4), True
        nn.init.constant_(self.side.weight, 0.1)
        nn.init.zeros_(self.side.bias)
        self.net.middle.weight.requires_grad_(False)

    def forward(self, x, y):
        loss = self.net(x, y)
        return loss + self.side(x).square().mean() if self.uses_side else loss


@pytest.mark.ranks(2, 3)
@EACH
def test_frozen_parameters_and_gradients_on_one_rank_only(name, world):
    model = Gated()
    model.uses_side = world.comm.rank == 0
    engine = engine_of(name, 0, 1, model)
    before, stages = weights(model), []
    for batch in samples(12):
        run_step(engine, batch)
        stages.append(model.side.weight.detach().clone())
    assert torch.equal(model.net.middle.weight, before["net.middle.weight"])
    assert is_same_on_ranks(engine)
    assert len({tuple(stage.flatten().tolist()) for stage in stages}) == 12
    assert (model.side.weight - before["side.weight"]).abs().max() < 0.2
    engine.destroy()


@EACH
@pytest.mark.parametrize("steps", [FREEZE + 2, 11])
def test_a_second_engine_takes_the_model_over(name, steps):
    model = Mlp()
    first = engine_of(name, 0, 1, model)
    for batch in samples(steps):
        run_step(first, batch)
    first.destroy()
    second = engine_of(name, 0, 1, model)
    assert is_same_on_ranks(second)
    for batch in samples(11):
        run_step(second, batch)
    assert second.skipped_steps == 0
    second.destroy()


@EACH
def test_sums_of_the_warm_up_may_travel_in_16_bits(name):
    engine = engine_of(name, 0, 1, communication_data_type="fp16")
    engine.mesh.comm_trace.reset()
    run_step(engine, samples(1)[0])
    n, elements = engine.mesh["data"].size, sum(unit.layout.padded for unit in engine.parts.table.units)
    norm = 8 * (exact_sum.LIMBS + MOST_NOTES)
    assert engine.mesh.comm_trace.total_bytes("all_reduce") == 2 * (2 * elements + norm) * (n - 1) // n
    for batch in samples(11):
        run_step(engine, batch)
    assert is_same_on_ranks(engine)
    engine.destroy()


@EACH
def test_sparse_embeddings_give_what_dense_ones_do(name):
    found = []
    for is_sparse in (False, True):
        engine = start(
            words_settings(name, sparse_gradients=is_sparse, reduction="ordered"), Words(is_sparse=is_sparse)
        )
        for step in range(12):
            run_step(engine, words(step))
        found.append(weights(engine))
        engine.destroy()
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-4, atol=1e-5)


OFFLOADED = [("cpu", "fp32"), ("nvme", "fp32"), ("nvme", "bf16")]


@pytest.mark.parametrize(
    ("name", "device", "dtype"), in_turn([(name, *row) for row in OFFLOADED for name in NAMES], ranks=(2, 3, 1, 2))
)
def test_states_in_host_memory_and_in_files_change_no_bit(name, device, dtype, mpi_tmp_path):
    """Parameters are longer than windows of files; a run in memory goes on where one in files stopped, and back."""
    data, at = samples(13), 11  # 0/1 Adam is between two meetings then
    more = {"reduction": "ordered", "zero_allow_untested_optimizer": True, **PRECISIONS[dtype]}
    memory, moved = settings(name, 1, **more), settings(name, 1, **more)
    moved["zero_optimization"] |= {"sub_group_size": 2048, "overlap_comm": True}
    moved["zero_optimization"]["offload_optimizer"] = {"device": device, "nvme_path": str(mpi_tmp_path / "disk")}

    def make(config, seed=7):
        model = Mlp(seed)
        with torch.random.fork_rng(devices=[]):
            model.middle, model.last = nn.Linear(32, 260), nn.Linear(260, 4)
        for param in model.parameters():
            torch.nn.init.trunc_normal_(param, std=0.1, generator=torch.Generator().manual_seed(seed))
        return start(config, model)

    def finish(engine):
        for batch in data[at:]:
            run_step(engine, batch)
        found = weights(engine), states_of(engine)
        engine.destroy()
        return found

    results = []
    for tag, config in (("memory", memory), ("moved", moved)):
        engine = make(config)
        for batch in data[:at]:
            run_step(engine, batch)
        assert engine.parts.params.tiers.is_swapping == (tag == "moved" and device == "nvme")
        engine.save_checkpoint(str(mpi_tmp_path / tag))
        results.append(finish(engine))
    for tag, config in (("moved", memory), ("memory", moved)) if device == "nvme" else ():
        engine = make(config, seed=9)
        engine.load_checkpoint(str(mpi_tmp_path / tag))
        results.append(finish(engine))
    for result in results[1:]:
        for plain, other in zip(results[0], result, strict=True):
            same_bits(plain, other)


@pytest.mark.ranks(2)
@EACH
def test_quantized_sums_of_the_warm_up(name, monkeypatch):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "1")
    config = settings(name, 1)
    config["zero_optimization"]["zero_quantized_gradients"] = True
    engine = start(config, Mlp())
    losses = []
    for _ in range(12):
        losses.append(run_step(engine, samples(1)[0]))
        if kind_of(engine, len(losses)) is not Exchange.NOTHING:
            assert is_same_on_ranks(engine)
    assert losses[-1] < losses[0]
    engine.destroy()


@pytest.mark.ranks(2)
def test_optimizers_given_in_code_sum_as_before():
    model = Mlp()
    engine = mpispeed.initialize(
        model=model,
        config={"train_batch_size": BATCH, "zero_optimization": {"stage": 0}},
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    )[0]
    assert not engine.parts.optimization.exchange.is_phased
    for batch in samples(3):
        run_step(engine, batch)
    assert engine.mesh.comm_trace.total_bytes("compressed_all_reduce") == 0
    assert is_same_on_ranks(engine)
    assert safe_get_full_fp32_param(model.first.weight) is not None
    engine.destroy()
