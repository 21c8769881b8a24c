"""Gathering cut parameters outside of forward: reading, changing, generating; and parameters of other modules."""

import time

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import AgreementError, StoreError, UsageError
from mpispeed.sharding import sharded_param
from tests.helpers.covering import on_ranks
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights, zero_section

pytestmark = pytest.mark.ranks(1, 3)


def engine_of(stage=3, model=None, dtype="fp32", **more):
    settings = config(stage, 12, 1, dtype=dtype, reduction="ordered", **WARM) | more
    return mpispeed.initialize(model=TinyLM() if model is None else model, config=settings)[0]


def is_cut(engine):
    return engine.mesh["data"].size > 1


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("form", ["one", "list", "tuple", "generator", "duplicates"])
def test_parameters_are_whole_inside_and_cut_outside(form):
    engine = engine_of()
    param, expected = engine.module.blocks[0].up.weight, TinyLM().blocks[0].up.weight
    params = {
        "one": param,
        "list": [param],
        "tuple": (param, engine.module.norm.weight),
        "generator": (p for p in [param]),
        "duplicates": [param, param],
    }[form]
    assert sharded_param.is_sharded(param) == is_cut(engine)
    with zero.GatheredParameters(params):
        assert torch.equal(param, expected)
    assert sharded_param.is_sharded(param) == is_cut(engine)
    if is_cut(engine):
        with pytest.raises(UsageError, match="GatheredParameters"):
            param.sum()
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"], ranks=(1, 3)))
def test_changes_of_the_modifier_rank_reach_all_ranks_and_the_masters(stage, dtype):
    engine = engine_of(stage, dtype=dtype)
    rank, root = engine.mesh.rank, engine.mesh.size - 1
    params = [engine.module.blocks[0].up.weight, engine.module.blocks[1].norm.bias, engine.module.scale]
    with zero.GatheredParameters(params, modifier_rank=root), torch.no_grad():
        params[0].fill_(1.0 + rank)
        params[1].data = torch.full_like(params[1], 3.0 + rank)  # other memory
        params[2].data.mul_(0).add_(5.0 + rank)
    found = weights(engine)
    for name, param, value in zip(
        ("blocks.0.up.weight", "blocks.1.norm.bias", "scale"), params, (1.0, 3.0, 5.0), strict=True
    ):
        expected = torch.full(param.shape, value + root)
        assert torch.equal(found[name].float(), expected)
        assert torch.equal(zero.safe_get_full_fp32_param(param), expected)
    train_averaged(engine, batches(4, 12))  # warm-up: the first two steps have learning rate 0
    assert not torch.equal(zero.safe_get_full_fp32_param(params[1]), torch.full(params[1].shape, 3.0 + root))
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("has_forward_before", [False, True])
def test_without_a_modifier_rank_changes_are_dropped(has_forward_before):
    engine = engine_of()
    if has_forward_before:  # then the whole copies would be kept for the next forward
        train_averaged(engine, batches(2, 12))
    param, before = engine.module.blocks[0].up.weight, weights(engine)["blocks.0.up.weight"]
    with zero.GatheredParameters(param), torch.no_grad():
        param.fill_(7.0)
        param.data.fill_(8.0)
    assert torch.equal(weights(engine)["blocks.0.up.weight"], before)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_nested_contexts():
    engine = engine_of()
    a, b = engine.module.blocks[0].up.weight, engine.module.blocks[1].up.weight
    with zero.GatheredParameters([a], modifier_rank=0), torch.no_grad():
        a.fill_(1.0)
        with zero.GatheredParameters([a, None, b]):
            assert bool((a == 1.0).all())
            b.fill_(2.0)
        a.add_(1.0)
        assert sharded_param.is_sharded(b) == is_cut(engine)
    found = weights(engine)
    assert bool((found["blocks.0.up.weight"] == 2.0).all())
    if is_cut(engine):
        assert torch.equal(found["blocks.1.up.weight"], TinyLM().blocks[1].up.weight)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_an_exception_on_one_rank_reaches_the_others_and_nothing_is_kept():
    engine = engine_of()
    param, before = engine.module.blocks[0].up.weight, weights(engine)["blocks.0.up.weight"]
    expected, text = (FileNotFoundError, "gone") if engine.mesh.rank == 0 else (AgreementError, "rank 0: .*gone")
    with (
        pytest.raises(expected, match=text),
        zero.GatheredParameters(param, modifier_rank=0),
        torch.no_grad(),
    ):
        param.fill_(3.0)
        if engine.mesh.rank == 0:
            raise FileNotFoundError("gone")
    assert sharded_param.is_sharded(param)
    assert torch.equal(weights(engine)["blocks.0.up.weight"], before)
    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(param):
        _ = 1 / 0
    assert sharded_param.is_sharded(param)
    train_averaged(engine, batches(1, 12))
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_different_parameters_or_modifier_ranks_are_refused_on_all_ranks():
    engine = engine_of()
    rank = engine.mesh.rank
    param = engine.module.blocks[rank % 2].up.weight
    with (
        pytest.raises(UsageError, match=r"rank 0: blocks\.0\.up\.weight .*rank 1: blocks\.1\.up\.weight"),
        zero.GatheredParameters(param),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"rank 0: .*modifier_rank=0.*rank 1: .*modifier_rank=1"),
        zero.GatheredParameters(engine.module.scale, modifier_rank=rank % 2),
    ):
        pass
    train_averaged(engine, batches(1, 12))
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_what_is_not_possible_is_told():
    engine = engine_of()
    size, param = engine.mesh.size, engine.module.blocks[0].up.weight
    for root in (size, -1, "0", True):
        with pytest.raises(UsageError, match=f"0 to {size - 1}"):
            zero.GatheredParameters(param, modifier_rank=root)
    for wrong, kind in ((torch.zeros(2), "Tensor"), ([param, "x"], "str"), (3, "int"), (None, "NoneType")):
        with pytest.raises(UsageError, match=f"found a {kind}"):
            zero.GatheredParameters(wrong)
    with pytest.raises(UsageError, match="was given data of 2"), zero.GatheredParameters(param, modifier_rank=0):
        param.data = torch.zeros(2)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_ordinary_parameters_and_disabled_contexts_are_left_alone():
    param = nn.Parameter(torch.ones(3))
    with zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
        param.fill_(2.0)
    assert bool((param == 2.0).all())
    with zero.GatheredParameters(None, enabled=False):
        pass


class Reader(nn.Module):
    """Uses a weight of another module in its forward, gathered by hand."""

    def __init__(self, other, gathers):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.get, self.gathers = lambda: other.weight, gathers

    def forward(self, x):
        if not self.gathers:
            return self.inner(x) @ self.get()
        with zero.GatheredParameters(self.get()):
            return self.inner(x) @ self.get()


class TwoParts(nn.Module):
    def __init__(self, gathers=False):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6)
        self.second = Reader(self.first, gathers)
        self.third = nn.Linear(6, 6)

    def forward(self, x):
        return self.third(self.second(self.first(x))).square().mean()


def train_parts(model, steps=4, stage=3):
    engine = engine_of(stage, model, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1}})
    for step in range(steps):
        x = torch.rand(3, 6, generator=torch.Generator().manual_seed(10 * step + engine.mesh.rank))
        engine.backward(engine(x))
        engine.step()
    return engine


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", ["read", "gathered", "registered"])
def test_weights_of_other_modules_inside_of_forward(kind):
    expected = train_parts(TwoParts(), stage=0)
    model = TwoParts(gathers=kind == "gathered")
    if kind == "registered":
        zero.register_external_parameter(model.second, model.first.weight)
        zero.register_external_parameter(model.second, model.first.weight)
    engine = train_parts(model)
    found = weights(engine)
    for name, value in weights(expected).items():
        assert torch.equal(found[name], value)
    if kind == "registered":
        zero.unregister_external_parameter(model.second, model.first.weight)
        with pytest.raises(RuntimeError, match="no such parameter was registered"):
            zero.unregister_external_parameter(model.second, model.first.weight)
    engine.destroy()
    expected.destroy()


@pytest.mark.mpi(min_size=1)
def test_external_registration_takes_modules_and_parameters():
    for wrong in ((nn.Linear(1, 1), torch.zeros(1)), (None, nn.Parameter(torch.zeros(1)))):
        with pytest.raises(RuntimeError, match="registered as"):
            zero.register_external_parameter(*wrong)


@pytest.mark.mpi(min_size=2)
def test_a_registered_parameter_is_fetched_at_the_entry_of_the_module():
    model = TwoParts()
    engine = engine_of(3, model, zero_optimization=zero_section(3, stage3_max_reuse_distance=0))
    seen = []
    model.second.inner.register_forward_hook(lambda *_: seen.append(sharded_param.is_sharded(model.first.weight)))
    with zero.GatheredParameters(model.third.weight, fwd_module=model.second):
        pass  # another parameter: no matter
    with torch.no_grad():
        engine(torch.ones(1, 6))
        zero.register_external_parameter(model.second, model.first.weight)
        engine(torch.ones(1, 6))
        zero.unregister_external_parameter(model.second, model.first.weight)
        engine(torch.ones(1, 6))
    assert seen == [True, False, True]
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_ranks_generate_different_lengths_and_train_on():
    engine, other = engine_of(), engine_of()
    for kind in (engine, other):
        train_averaged(kind, batches(2, 12))
    with zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        assert model is engine.module
        comm_trace = engine.mesh.comm_trace.entries()
        for _ in range(1 + 3 * engine.mesh.rank):
            model(batches(1, 12)[0])
            engine(batches(1, 12)[0])
            model.blocks[engine.mesh.rank % 2](torch.ones(1, 2, 24))
        assert engine.mesh.comm_trace.entries() == comm_trace
    assert sharded_param.is_sharded(engine.module.head.weight)
    assert train_averaged(engine, batches(3, 12, 8)) == train_averaged(other, batches(3, 12, 8))
    engine.destroy()
    other.destroy()


@pytest.mark.mpi(min_size=2)
def test_the_cache_is_emptied_on_demand():
    engine = engine_of()
    train_averaged(engine, batches(2, 12))
    with torch.no_grad():
        engine(batches(1, 12)[0])
    with zero.GatheredParameters(engine.module.head.weight), pytest.raises(StoreError, match="are in use"):
        engine.empty_partition_cache()
    engine(batches(1, 12)[0])  # what backward needs is kept
    tally = engine.parts.params.prefetcher.tally
    assert tally.live_elements > 0
    engine.empty_partition_cache()
    assert tally.live_elements == 0
    assert all(sharded_param.is_sharded(param) for param in engine.module.parameters())
    zero.empty_partition_cache(engine)
    assert weights(engine).keys() == dict(engine.module.named_parameters()).keys()
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_two_engines_do_not_disturb_each_other():
    first, second = engine_of(3), start(config(3, 12, 1, **WARM, reduction="ordered"), TinyLM(seed=8))
    with (
        zero.GatheredParameters([first.module.norm.weight, second.module.norm.weight], modifier_rank=0),
        torch.no_grad(),
    ):
        first.module.norm.weight.fill_(2.0)
        second.module.norm.weight.fill_(3.0)
    assert bool((weights(first)["norm.weight"] == 2.0).all())
    assert bool((weights(second)["norm.weight"] == 3.0).all())
    values = zero.get_full_fp32_params([second.module.norm.weight, first.module.norm.weight])
    assert [float(value[0]) for value in values] == [3.0, 2.0]
    first.destroy()
    second.destroy()


@pytest.mark.ranks(3)
@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_something_else_is_found_out():
    engine = engine_of()
    train_averaged(engine, batches(2, 12))
    begin = time.monotonic()
    with pytest.raises(AgreementError, match="GatheredParameters"):
        if engine.mesh.rank == 0:
            with zero.GatheredParameters(engine.module.head.weight):
                pass
        train_averaged(engine, batches(1, 12))
    assert time.monotonic() - begin < 60.0
    engine.destroy()
