"""Masters, gradients and optimizer state by parameter: get, set, and what the next step makes of it."""

import pytest
import torch

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import UsageError
from tests.helpers.covering import on_ranks
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights, zero_section

pytestmark = pytest.mark.ranks(1, 3)

SLOTS = ("exp_avg", "exp_avg_sq")
DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def frozen_model(**more):
    model = TinyLM(**more)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def engine_of(stage, dtype="fp32", model=None, optimizer=None, **more):
    settings = config(stage, 12, 1, **WARM, reduction="ordered", **DTYPES[dtype]) | more
    if optimizer is not None:
        settings |= {"optimizer": optimizer, "zero_allow_untested_optimizer": True}
        del settings["scheduler"]
    return mpispeed.initialize(model=frozen_model() if model is None else model, config=settings)[0]


def backward(engine, seed=5):
    rank, size = engine.mesh.index("data"), engine.mesh["data"].size
    batch = batches(1, 12, seed)[0]
    engine.backward(engine(batch[rank * 12 // size : (rank + 1) * 12 // size]))


def cut_of(engine, param):
    """This rank's range of the flattened parameter."""
    store, place = engine.parts.params, engine.parts.table.locate(param)
    return place.entry.span.intersect(store.shards.span(place.unit)).shifted(-place.entry.offset)


def values_like(param, seed):
    return torch.rand(param.shape, generator=torch.Generator().manual_seed(seed)) + 0.25


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], list(DTYPES), ranks=(1, 3)))
def test_set_then_get_is_equal_for_every_kind_of_state(stage, dtype):
    engine = engine_of(stage, dtype)
    train_averaged(engine, batches(2, 12))
    backward(engine)
    for seed, param in enumerate(engine.module.parameters()):
        value = values_like(param, seed)
        zero.safe_set_full_fp32_param(param, value)
        zero.safe_set_full_grad(param, value + 1)
        for number, slot in enumerate(SLOTS):
            zero.safe_set_full_optimizer_state(param, value + 2 + number, slot)
        if not param.requires_grad:
            assert zero.safe_get_full_fp32_param(param) is None
            assert zero.safe_get_full_grad(param) is None
            assert zero.safe_get_full_optimizer_state(param, "exp_avg") is None
            continue
        assert torch.equal(zero.safe_get_full_fp32_param(param), value)
        assert zero.safe_get_full_fp32_param(param).dtype == torch.float32
        assert torch.equal(zero.safe_get_full_grad(param), value + 1)
        for number, slot in enumerate(SLOTS):
            assert torch.equal(zero.safe_get_full_optimizer_state(param, slot), value + 2 + number)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_stages_agree_on_everything_that_can_be_read(dtype):
    seen = []
    for stage in range(0 if dtype == "fp32" else 1, 4):  # at stage 0 sums of 16-bit gradients travel back in 16 bits
        engine = engine_of(stage, dtype, zero_optimization=zero_section(stage, stage3_param_persistence_threshold=0))
        train_averaged(engine, batches(3, 12))
        backward(engine)
        params = list(engine.module.parameters())
        states = [zero.get_full_optimizer_states(params, slot) for slot in SLOTS]
        seen.append([zero.get_full_fp32_params(params), zero.get_full_grads(params), *states])
        engine.destroy()
    for kinds in seen[1:]:
        for kind, expected in zip(kinds, seen[0], strict=True):
            for ours, theirs in zip(kind, expected, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)


@pytest.mark.mpi(min_size=1)
def test_gradients_are_those_of_plain_torch_times_the_loss_scale():
    for dtype, scale, bound in (("fp32", 1.0, 1e-6), ("fp16", 256.0, 2e-3)):
        model = frozen_model()
        model(batches(1, 12, 5)[0]).backward()
        engine = engine_of(3, dtype, frozen_model())
        backward(engine)
        for ours, plain in zip(engine.module.parameters(), model.parameters(), strict=True):
            if ours.requires_grad:
                torch.testing.assert_close(zero.safe_get_full_grad(ours) / scale, plain.grad, rtol=0, atol=bound)
        engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_local_parts_are_the_ranges_of_the_full_values(dtype):
    engine = engine_of(3, dtype)
    train_averaged(engine, batches(2, 12))
    backward(engine)
    for seed, param in enumerate(engine.module.parameters()):
        if not param.requires_grad:
            assert zero.safe_get_local_fp32_param(param) is None
            assert zero.safe_get_local_grad(param) is None
            assert zero.safe_get_local_optimizer_state(param, "exp_avg") is None
            zero.safe_set_local_fp32_param(param, torch.zeros(1))
            continue
        own = cut_of(engine, param).slice
        value = values_like(param, seed)
        for full, get_full, get_local, set_local in (
            (value, zero.safe_get_full_fp32_param, zero.safe_get_local_fp32_param, zero.safe_set_local_fp32_param),
            (value + 1, zero.safe_get_full_grad, zero.safe_get_local_grad, zero.safe_set_local_grad),
        ):
            assert torch.equal(get_local(param), get_full(param).view(-1)[own])
            set_local(param, full.view(-1)[own])
            assert torch.equal(get_full(param), full)
        for slot in SLOTS:
            before = zero.safe_get_full_optimizer_state(param, slot).view(-1)[own]
            assert torch.equal(zero.safe_get_local_optimizer_state(param, slot), before)
            zero.safe_set_local_optimizer_state(param, (value + 2).view(-1)[own], slot)
            assert torch.equal(zero.safe_get_full_optimizer_state(param, slot), value + 2)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_local_access_is_refused_where_parameters_are_whole(stage):
    engine = engine_of(stage)
    param = engine.module.head.weight
    backward(engine)
    for call in (
        zero.safe_get_local_fp32_param,
        zero.safe_get_local_grad,
        lambda p: zero.safe_get_local_optimizer_state(p, "exp_avg"),
        lambda p: zero.safe_set_local_fp32_param(p, p),
        lambda p: zero.safe_set_local_grad(p, p),
        lambda p: zero.safe_set_local_optimizer_state(p, p, "exp_avg"),
    ):
        with pytest.raises(UsageError, match="not cut"):
            call(param)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_step_uses_gradients_that_were_set(stage):
    engine = engine_of(stage, optimizer={"type": "SGD", "params": {"lr": 0.5}}, gradient_clipping=0.0)
    backward(engine)
    expected = {}
    for seed, (name, param) in enumerate(engine.module.named_parameters()):
        if param.requires_grad:
            value = values_like(param, seed)
            zero.safe_set_full_grad(param, value)
            expected[name] = zero.safe_get_full_fp32_param(param) - 0.5 * value
    engine.step()
    after = weights(engine)
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-7)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"], ranks=(1, 3)))
def test_masters_reach_the_model_when_the_documentation_says(stage, dtype):
    engine = engine_of(stage, dtype)
    param, name = engine.module.blocks[1].up.weight, "blocks.1.up.weight"
    value, compute = values_like(param, 1), param.dtype
    before = weights(engine)[name]
    engine(batches(1, 12)[0][:2])  # leaves whole copies behind where parameters are cut
    zero.safe_set_full_fp32_param(param, value)
    assert torch.equal(weights(engine)[name], value if dtype == "fp32" else before)
    zero.safe_set_full_fp32_param(param, value + 1, refresh=True)
    assert torch.equal(weights(engine)[name], (value + 1).to(compute))
    zero.safe_set_full_fp32_param(param, value)
    backward(engine)
    for group in engine.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    engine.step()
    assert torch.equal(weights(engine)[name], value.to(compute))
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("kind", "slot"), [("RMSprop", "square_avg"), ("Adagrad", "sum")])
def test_optimizers_that_keep_their_state_themselves(stage, kind, slot):
    model = frozen_model()
    made = getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    settings = config(stage, 12, 1, **WARM, zero_allow_untested_optimizer=True)
    del settings["optimizer"], settings["scheduler"]
    engine = mpispeed.initialize(model=model, optimizer=made, config=settings)[0]
    param = model.blocks[1].up.weight
    with pytest.raises(ValueError, match="appear with its first step"):
        zero.safe_get_full_optimizer_state(param, slot)
    train_averaged(engine, batches(2, 12))
    for seed, param in enumerate(model.parameters()):
        if param.requires_grad:
            value = values_like(param, seed)
            zero.safe_set_full_optimizer_state(param, value, slot)
            assert torch.equal(zero.safe_get_full_optimizer_state(param, slot), value)
    train_averaged(engine, batches(1, 12, 9))
    assert not torch.equal(zero.safe_get_full_optimizer_state(param, slot), value)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batched_getters_gather_every_unit_once(stage):
    engine = engine_of(stage, zero_optimization=zero_section(stage, stage3_param_persistence_threshold=0))
    train_averaged(engine, batches(1, 12))
    backward(engine)
    params, units = list(engine.module.parameters()), len(engine.parts.table.units)
    assert len([p for p in params if p.requires_grad]) > units > 2
    key = ("all_gather", ("data",))
    for read in (
        zero.get_full_fp32_params,
        zero.get_full_grads,
        lambda p: zero.get_full_optimizer_states(p, "exp_avg"),
    ):
        engine.mesh.comm_trace.reset()
        found = read(params)
        assert engine.mesh.comm_trace.entries()[key].count == units
        assert [value is None for value in found] == [not param.requires_grad for param in params]
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_exist_between_backward_and_step_only(stage):
    engine = engine_of(stage, gradient_accumulation_steps=2, train_batch_size=24)
    param = engine.module.head.weight
    for call in (zero.safe_get_full_grad, lambda p: zero.safe_set_full_grad(p, torch.zeros(p.shape))):
        with pytest.raises(ValueError, match=r"after engine\.backward"):
            call(param)
    backward(engine, 1)
    first = zero.safe_get_full_grad(param)  # in the middle of an accumulation: sums are made early
    engine.step()
    backward(engine, 2)
    both = zero.safe_get_full_grad(param)
    assert not torch.equal(first, both)
    engine.step()
    with pytest.raises(ValueError, match=r"after engine\.backward"):
        zero.safe_get_full_grad(param)
    other = engine_of(stage, gradient_accumulation_steps=2, train_batch_size=24)
    for seed in (1, 2):
        backward(other, seed)
        if seed == 1:
            other.step()
    # An early sum over ranks is added to the later one instead of adding before summing: one rounding more each.
    torch.testing.assert_close(zero.safe_get_full_grad(other.module.head.weight), both, rtol=1e-5, atol=1e-7)
    engine.destroy()
    other.destroy()


@pytest.mark.mpi(min_size=1)
def test_mistakes_are_told():
    engine = engine_of(3)
    param = engine.module.blocks[1].up.weight
    with pytest.raises(ValueError, match=r"no state 'exp_avf'; it has exp_avg, exp_avg_sq.*mean \"exp_avg\""):
        zero.safe_get_full_optimizer_state(param, "exp_avf")
    with pytest.raises(ValueError, match="no state 'nothing'"):
        zero.safe_set_full_optimizer_state(param, torch.zeros(param.shape), "nothing")
    with pytest.raises(UsageError, match=rf"{param.numel()} elements, found 3 elements"):
        zero.safe_set_full_fp32_param(param, torch.zeros(3))
    with pytest.raises(UsageError, match="found a float"):
        zero.safe_set_full_fp32_param(param, 1.0)
    with pytest.raises(UsageError, match="elements, found"):
        zero.safe_set_local_fp32_param(param, torch.zeros(param.numel() + 1))
    with pytest.raises(UsageError, match="found a Tensor"):
        zero.safe_get_full_fp32_param(torch.zeros(2))
    with pytest.raises(UsageError, match="belongs to no engine"):
        zero.safe_get_full_fp32_param(torch.nn.Parameter(torch.zeros(2)))
    engine.destroy()
    with pytest.raises(UsageError, match="belongs to no engine"):
        zero.safe_get_full_fp32_param(param)


@pytest.mark.mpi(min_size=1)
def test_local_parts_of_all_ranks_are_the_whole_parameter():
    engine = engine_of(3)
    for param in engine.module.parameters():
        parts = engine.mesh["data"].gather_objects(zero.safe_get_local_fp32_param(param))
        if param.requires_grad:
            assert torch.equal(torch.cat(parts), zero.safe_get_full_fp32_param(param).view(-1))
    engine.destroy()
