"""Modules that are born cut: values, reads and initialisation on the way, memory, engines of every stage."""

import gc
import json
import math

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed import zero
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.comm import new_group
from mpispeed.sharding import sharded_init, sharded_param
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights

pytestmark = pytest.mark.ranks(1, 3)


def rank_and_size():
    world = mpispeed.init_distributed()
    return world.rank, world.size


def whole(model):
    """Copies of all parameters of a model that no engine has."""
    with zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


class Gpt(nn.Module):
    """Initialised as nanoGPT is: `apply` from the root's constructor, then some weights by name."""

    def __init__(self, seed=1, blocks=2, *, copies=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(blocks)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(3))
        self.apply(self.start)
        for name, param in self.named_parameters():
            if name.endswith("2.weight"):
                nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(4))
        self.blocks[0][1].weight.data.normal_(mean=0.0, std=0.5)
        if copies:
            self.blocks[1][1].weight.data.copy_(self.blocks[0][1].weight.data)
        with torch.no_grad():
            self.blocks[0][2].bias += self.blocks[0][2].weight.mean()
            self.embed.weight[3] = 0.0

    def start(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale.sum()
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.mpi(min_size=1)
def test_a_model_initialised_as_nanogpt_is_has_the_same_values():
    expected = Gpt()
    with zero.Init():
        model = Gpt()
    assert all(sharded_param.is_sharded(param) for param in model.parameters())
    assert model.head.weight is model.embed.weight
    same_bits(whole(model), dict(expected.named_parameters()))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.mpi(min_size=2)
def test_values_are_those_of_the_first_rank():
    rank, _ = rank_and_size()
    with zero.Init():
        model = Gpt(seed=1 + rank)
    same_bits(whole(model), dict(Gpt(seed=1).named_parameters()))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"]))
def test_training_is_bitwise_that_of_a_model_born_whole(stage, dtype):
    settings = config(stage, 12, 1, **WARM, reduction="ordered")
    settings |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    results = []
    for is_init_sharded in (False, True):
        with zero.Init(enabled=is_init_sharded):
            model = TinyLM()
        model.blocks[0].up.weight.requires_grad_(False)
        engine = mpispeed.initialize(model=model, config=settings)[0]
        assert engine.module.embed.weight.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        results.append((train_averaged(engine, batches(4, 12)), weights(engine)))
        assert all(sharded_init.find_init_shard(param) is None for param in model.parameters())
        if stage < 3:
            assert not any(sharded_param.is_sharded(param) for param in model.parameters())
        engine.destroy()
    assert results[0][0] == results[1][0]
    same_bits(results[1][1], results[0][1])


@pytest.mark.mpi(min_size=1)
def test_a_client_optimizer_takes_born_parameters():
    results = []
    for is_init_sharded in (False, True):
        with zero.Init(enabled=is_init_sharded):
            model = TinyLM()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        settings = config(3, 12, 1, **WARM, reduction="ordered")
        del settings["optimizer"], settings["scheduler"]
        engine = mpispeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        results.append(train_averaged(engine, batches(4, 12)))
        engine.destroy()
    assert results[0] == results[1]


@pytest.mark.mpi(min_size=2)
def test_no_rank_ever_holds_more_than_one_module_of_others():
    with zero.Init() as context:
        model = Gpt(blocks=6, copies=False)  # copies would need two modules at once
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    assert 0 < context.sharded_init.peak_elements <= largest
    assert context.sharded_init.live_elements == 0
    held = sum(sharded_init.find_init_shard(p).shard.numel() for p in model.parameters())
    _, size = rank_and_size()
    assert held == sum(-(-p.numel() // size) for p in model.parameters())


@pytest.mark.mpi(min_size=2)
def test_initialize_holds_one_unit_and_frees_the_parts():
    with zero.Init() as context:
        model = TinyLM(depth=6)
    context.sharded_init.peak_elements = 0
    shards = [sharded_param.owner_of(p) for p in model.parameters()]
    assert set(map(id, shards)) == {id(context.sharded_init)}
    engine = mpispeed.initialize(model=model, config=config(3, 12, 1, **WARM))[0]
    assert context.sharded_init.peak_elements == max(unit.layout.numel for unit in engine.parts.table.all_units)
    assert context.sharded_init.peak_elements < sum(p.numel() for p in model.parameters()) / 3
    assert all(sharded_init.find_init_shard(param) is None for param in model.parameters())
    engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_parts_go_with_their_model():
    gc.collect()
    before = len(sharded_init._INIT_SHARD)
    with zero.Init():
        model = Gpt()
    assert len(sharded_init._INIT_SHARD) > before
    del model
    gc.collect()
    assert len(sharded_init._INIT_SHARD) == before


class GrandPa(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(5))
        self.one.data += 1


class Pa(GrandPa):
    def __init__(self):
        super().__init__()
        self.two = nn.Parameter(torch.ones(5))
        self.one.data += 1
        self.two.data += 1


class Son(Pa):
    def __init__(self):
        super().__init__()
        self.three = nn.Parameter(torch.ones(5))
        for param in (self.one, self.two, self.three):
            param.data += 1


class Heir(Son):
    """Without a constructor of its own."""


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("cls", [Son, Heir])
def test_constructors_of_parent_classes_see_whole_parameters(cls):
    with zero.Init():
        model = cls()
    assert [float(value[0]) for value in whole(model).values()] == [4.0, 3.0, 2.0]


@pytest.mark.mpi(min_size=1)
def test_classes_are_patched_inside_only():
    originals = nn.Linear.__init__, nn.Module.apply, nn.Module.to_empty, Son.__init__
    with zero.Init():
        assert nn.Linear.__init__ is not originals[0]
        with zero.Init():

            class Later(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.ones(2))

        assert sharded_param.is_sharded(Later().weight)
        with zero.Init(enabled=False):
            assert sharded_param.is_sharded(Later().weight)
    assert (nn.Linear.__init__, nn.Module.apply, nn.Module.to_empty, Son.__init__) == originals
    assert not sharded_param.is_sharded(Later().weight)
    assert not sharded_param.is_sharded(nn.Linear(2, 2).weight)
    assert "__init_subclass__" not in vars(nn.Module)
    with pytest.raises(ZeroDivisionError), zero.Init(), zero.Init():
        _ = 1 / 0
    assert (nn.Linear.__init__, nn.Module.apply, nn.Module.to_empty, Son.__init__) == originals


@pytest.mark.mpi(min_size=1)
def test_a_constructor_that_fails_leaves_nothing_behind():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            raise FileNotFoundError

    with zero.Init():
        with pytest.raises(FileNotFoundError):
            Failing()
        model = nn.Linear(3, 2)
    assert sharded_param.is_sharded(model.weight)


@pytest.mark.mpi(min_size=1)
def test_dtypes_groups_and_kinds():
    _, size = rank_and_size()
    with zero.Init(dtype=torch.bfloat16):
        model = nn.Linear(10, 10)
        norm = nn.BatchNorm1d(3)
        mixed = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float64))])
        mixed.append(nn.Parameter(torch.arange(3), requires_grad=False))
        holder = nn.Sequential(mixed)
        lazy = nn.LazyLinear(4)
        with zero.Init(dtype=torch.float16):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.shape == (10, 10)
    assert sharded_init.find_init_shard(model.weight).shard.numel() == math.ceil(100 / size)
    assert norm.num_batches_tracked.dtype == torch.int64
    assert [p.dtype for p in holder.parameters()] == [torch.float64, torch.int64]
    assert all(sharded_param.is_sharded(p) for p in holder.parameters())
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert inner.weight.dtype == torch.float16
    assert outer.weight.dtype == torch.bfloat16


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", ["dict", "path"])
def test_the_dtype_comes_from_the_config(kind, tmp_path):
    settings = {"train_batch_size": 12, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    with zero.Init(config_dict_or_path=settings if kind == "dict" else str(path)):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with zero.Init(config_dict_or_path=settings, dtype=torch.float32):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with zero.Init(config=settings):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("overrides", [True, False])
def test_apply_keeps_what_the_first_rank_has_made(overrides):
    rank, _ = rank_and_size()

    def fill(module):
        for param in module.parameters(recurse=False):
            param.data.fill_(1.0 + rank)

    settings = {"train_batch_size": 12, "zero_optimization": {"stage": 3, "override_module_apply": overrides}}
    with zero.Init(config_dict_or_path=settings) as context:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        assert model.apply(fill) is model
        assert overrides == (context.sharded_init.live_elements == 0)
    for value in whole(model).values():
        assert bool((value == 1.0).all())


@pytest.mark.mpi(min_size=1)
def test_an_exception_in_apply_keeps_nothing():
    def fail(module):
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.fill_(5.0)
        raise FileNotFoundError

    with zero.Init():
        model = nn.Linear(4, 3)
        expected = model.weight.detach().clone()
        with pytest.raises(FileNotFoundError):
            model.apply(fail)
    assert sharded_param.is_sharded(model.weight)
    assert torch.equal(whole(model)["weight"], expected)


@pytest.mark.mpi(min_size=1)
def test_an_existing_module_is_converted_once():
    model = Gpt()
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    zero.Init(module=model)
    owners = [sharded_param.owner_of(p) for p in model.parameters()]
    zero.Init(module=model, dtype=torch.bfloat16)
    assert owners == [sharded_param.owner_of(p) for p in model.parameters()]
    same_bits(whole(model), expected)


@pytest.mark.mpi(min_size=1)
def test_skip_init():
    _, size = rank_and_size()
    with zero.Init():
        layer = torch.nn.utils.skip_init(nn.Linear, 10, 10)
    assert sharded_param.is_sharded(layer.weight)
    assert sharded_init.find_init_shard(layer.weight).shard.numel() == math.ceil(100 / size)
    assert sharded_init.find_init_shard(layer.weight).shard.device.type == "cpu"


@pytest.mark.mpi(min_size=1)
def test_changes_before_initialize():
    with zero.Init():
        model = nn.Linear(4, 3)
    rank, size = rank_and_size()
    with pytest.raises(UsageError, match="no engine has it yet"):
        model.weight.sum()
    with zero.GatheredParameters(model.weight, modifier_rank=size - 1), torch.no_grad():
        model.weight.fill_(1.0 + rank)
        with zero.GatheredParameters(model.parameters()):
            model.bias.fill_(4.0)
    found = whole(model)
    assert bool((found["weight"] == float(size)).all())
    assert not bool((found["bias"] == 4.0).any())
    with pytest.raises(UsageError, match="belongs to no engine"):
        zero.safe_get_full_fp32_param(model.weight)


@pytest.mark.mpi(min_size=1)
def test_a_view_that_is_changed_late_is_not_lost():
    with zero.Init():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        first, second = model[0].weight.data, model[1].weight.data
        first.fill_(1.0)
        second.fill_(2.0)
        del first, second
    found = whole(model)
    assert bool((found["0.weight"] == 1.0).all())
    assert bool((found["1.weight"] == 2.0).all())


@pytest.mark.mpi(min_size=1)
def test_external_parameters_registered_in_a_constructor():
    class Borrowing(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            zero.register_external_parameter(self.second, self.first.weight)

        def forward(self, x):
            return (self.second(self.first(x)) @ self.first.weight).square().mean()

    losses = []
    for is_init_sharded in (False, True):
        with zero.Init(enabled=is_init_sharded):
            model = Borrowing()
        engine = mpispeed.initialize(model=model, config=config(3, 12, 1, **WARM, reduction="ordered"))[0]
        for _ in range(4):
            losses.append(float(engine.backward(engine(torch.ones(2, 6))).detach()))
            engine.step()
        engine.destroy()
    assert losses[:4] == losses[4:]


@pytest.mark.mpi(min_size=1)
def test_engines_made_inside_of_contexts_and_two_models():
    settings = config(3, 12, 1, **WARM, reduction="ordered")
    expected = []
    for seed in (7, 8):
        engine = mpispeed.initialize(model=TinyLM(seed=seed), config=settings)[0]
        expected.append(train_averaged(engine, batches(3, 12)))
        engine.destroy()
    with zero.Init():
        first = TinyLM(seed=7)
        one = mpispeed.initialize(model=first, config=settings)[0]
        losses = train_averaged(one, batches(3, 12))
        with zero.Init():
            second = TinyLM(seed=8)
        two = mpispeed.initialize(model=second, config=settings)[0]
    assert [losses, train_averaged(two, batches(3, 12))] == expected
    one.destroy()
    two.destroy()


@pytest.mark.mpi(min_size=2)
def test_smaller_groups():
    rank, size = rank_and_size()
    groups = [new_group([r]) for r in range(size)]
    with zero.Init(data_parallel_group=groups[rank]):
        torch.manual_seed(rank)
        model = nn.Linear(4, 3)
    expected = whole(model)["weight"]
    assert sharded_init.find_init_shard(model.weight).shard.numel() == 12
    engine = mpispeed.initialize(model=model, config=config(3, 12, 1, **WARM))[0]
    found = weights(engine)["weight"]  # ranks had different values: those of the first one count
    assert torch.equal(found, expected) == (rank == 0)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_what_is_not_possible_is_told():
    with pytest.raises(UsageError, match="remote_device='disk' is not available"):
        zero.Init(remote_device="disk")
    with pytest.raises(UsageError, match="param_swapper is not available"):
        zero.Init(param_swapper=object())
    with pytest.raises(UsageError, match=r"dtype torch\.float64"):
        zero.Init(dtype=torch.float64)
    with pytest.raises(UsageError, match="module is a str"):
        zero.Init(module="model")
    with pytest.raises(UsageError, match=r"group of ranks is a list"):
        zero.Init(data_parallel_group=[0])
    group = new_group(range(rank_and_size()[1]))
    with pytest.raises(ValueError, match="both given"):
        zero.Init(data_parallel_group=group, sequence_data_parallel_group=group)
    with pytest.raises(ValueError, match="both given"):
        zero.Init(config={"train_batch_size": 1}, config_dict_or_path={"train_batch_size": 1})
    with pytest.raises(ConfigError, match="zero_optimization"):
        zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 7}})
    with zero.Init(remote_device="cpu", pin_memory=True, sequence_data_parallel_group=group):
        assert sharded_param.is_sharded(nn.Linear(2, 2).weight)
    zero.Init(remote_device="nvme", enabled=False)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_start_from_what_was_born_in_16_bits(dtype):
    settings = config(3, 12, 1, dtype=dtype, **WARM)
    with zero.Init(config_dict_or_path=settings):
        model = TinyLM()
    engine = mpispeed.initialize(model=model, config=settings)[0]
    compute = model.norm.weight.dtype
    for param, plain in zip(model.parameters(), TinyLM().parameters(), strict=True):
        assert torch.equal(zero.safe_get_full_fp32_param(param), plain.detach().to(compute).float())
    losses = train_averaged(engine, batches(12, 12))
    assert losses[-1] < losses[0]
    engine.destroy()
