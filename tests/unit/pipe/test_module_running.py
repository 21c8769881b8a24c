"""Seeds, recomputation, measured cuts and tied weights of pipeline modules on simulated ranks."""

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from mpispeed.base.errors import StageError
from mpispeed.pipe import LayerSpec, TiedLayerSpec
from mpispeed.pipe.costs import measure
from mpispeed.pipe.layers import read_layers
from tests.unit.pipe.staged import Block, Table, as_head, staged


def specs(count=6):
    return [LayerSpec(Block, number) for number in range(count)]


def state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


# -- seeds (one rank: generators belong to the process, not to a simulated rank) ----------------------------------


def test_weights_follow_from_the_seed_and_the_index():
    layers = [LayerSpec(nn.Linear, 4, 4), torch.relu, LayerSpec(nn.Linear, 4, 4)]
    before = state()
    (found,) = staged(layers, lambda module: module.state_dict(), stages=1, seed_layers=True, base_seed=50)
    assert state() == before
    for index in (0, 2):
        torch.manual_seed(50 + index)
        assert torch.equal(found[f"{index}.weight"], nn.Linear(4, 4).weight)


def test_without_seeds_the_generators_go_on():
    torch.manual_seed(1)
    plain = [nn.Linear(4, 4).weight for _ in range(2)]
    torch.manual_seed(1)
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    (found,) = staged(layers, lambda module: list(module.parameters()), stages=1)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[2], plain[1])


def test_seeds_of_building_and_running():
    seeds = []

    def use(module):
        seeds.append("run")
        module(torch.ones(1, 4))
        module(torch.ones(1, 4))
        module.micro_offset = 10
        module(torch.ones(1, 4))
        return module.micro_offset

    layers = [TiedLayerSpec("t", Block, 0), torch.tanh, LayerSpec(Block, 1), TiedLayerSpec("t", Block, 0)]
    settings = {"seed_layers": True, "seed_fn": seeds.append, "base_seed": 100, "stages": 1}
    assert staged(layers, use, **settings) == [11]
    runs = [[100 * times + index for index in range(4)] for times in (2, 3, 12)]
    assert seeds == [100, 102, "run", *runs[0], *runs[1], *runs[2]]


def test_tied_weights_have_the_seed_of_their_first_use():
    seeds = []
    layers = [TiedLayerSpec("t", Block, 0), LayerSpec(Block, 1), TiedLayerSpec("t", Block, 0)]
    settings = {"seed_layers": True, "seed_fn": seeds.append, "base_seed": 100, "partition_method": "uniform"}
    staged(layers, lambda module: None, stages=3, **settings)
    assert sorted(seeds) == [100, 100, 101]


def test_recomputation_uses_the_seeds_of_its_own_forward_pass():
    def use(module):
        x = torch.ones(3, 4, requires_grad=True)
        module.activation_checkpoint_interval = 0
        outputs = [module(x) for _ in range(2)]
        plain = [torch.autograd.grad(out.sum(), x)[0] for out in outputs]
        module.micro_offset, module.activation_checkpoint_interval = 0, 2
        again = [module(x) for _ in range(2)]
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in reversed(again)][::-1]
        assert not torch.equal(outputs[0], outputs[1])
        return all(torch.equal(a, b) for a, b in zip([*outputs, *plain], [*again, *grads], strict=True))

    layers = [*specs(2), nn.Dropout(0.5), LayerSpec(Block, 2)]
    assert staged(layers, use, stages=1, seed_layers=True) == [True]


# -- recomputation -----------------------------------------------------------------------------------------------


def noting(calls):
    def func(function, *args):
        calls.append(args)
        return function(*args)

    return func


def test_blocks_of_an_interval_are_recomputed():
    calls = []

    def use(module):
        with torch.no_grad():
            module(torch.ones(1, 4))
        assert calls == []
        return module(torch.ones(1, 4))

    settings = {"stages": 1, "activation_checkpoint_interval": 2, "activation_checkpoint_func": noting(calls)}
    layers = [*specs(3), torch.tanh, torch.relu, torch.neg]
    (out,) = staged(layers, use, **settings)
    assert len(calls) == 2  # layers 0-1 and 2-3; 4 and 5 are functions
    expected = nn.Sequential(*[Block(number) for number in range(3)])(torch.ones(1, 4))
    assert torch.equal(out, -torch.relu(torch.tanh(expected)))


@pytest.mark.parametrize(("listed", "count"), [(["Block"], 1), (["Block", "tanh"], 2), ([], 0), (None, 2)])
def test_listed_layers_are_recomputed(listed, count):
    calls = []
    settings = {"activation_checkpoint_interval": 2, "activation_checkpoint_func": noting(calls)}
    layers = [*specs(3), torch.tanh]
    staged(layers, lambda module: module(torch.ones(1, 4)), stages=1, checkpointable_layers=listed, **settings)
    assert len(calls) == count


Pair = namedtuple("Pair", "x mask")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        (torch.ones(2),),
        (torch.ones(2), torch.zeros(2)),
        Pair(torch.ones(2), torch.zeros(2)),
        [torch.ones(2)],
    ],
)
def test_trees_pass_recomputed_blocks_as_they_are(value):
    class Keep(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            assert type(x) is type(value)
            return x

    calls = []
    settings = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": noting(calls)}
    (out,) = staged([Keep(), Keep()], lambda module: module(value), stages=1, **settings)
    assert type(out) is type(value)
    assert len(calls) == 2
    assert len(calls[0]) == (len(value) if isinstance(value, tuple) else 1)


def test_recomputed_gradients_are_the_same():
    def use(module):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
        grads = []
        for interval in (0, 1, 2, 5):
            module.activation_checkpoint_interval = interval
            module.zero_grad()
            module(x).square().sum().backward()
            grads.append([param.grad.clone() for param in module.parameters()])
        return all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))

    assert staged(specs(5), use, stages=1) == [True]


# -- measured cuts -----------------------------------------------------------------------------------------------


def test_measured_costs():
    layers = [
        TiedLayerSpec("t", Table, rows=1000),
        LayerSpec(Block, 1),
        torch.tanh,
        TiedLayerSpec("t", Table, rows=1000, forward_fn=as_head),
    ]
    before = state()
    costs = measure(read_layers(layers), torch.zeros(64, dtype=torch.int64))
    assert state() == before
    assert [cost.state_bytes for cost in costs] == [4 * 4 * 4001, 4 * 4 * 20, 0, 4 * 4 * 4001]
    assert all(cost.seconds > 0 for cost in costs)
    assert costs[2].activation_bytes == 64 * 4 * 4  # tanh keeps its result
    assert costs[3].activation_bytes == 64 * 4 * 4  # a product keeps its input; the weights do not count


class Slow(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        waste = torch.ones(self.size, self.size)
        for _ in range(20):
            waste = waste @ waste * 1e-3
        return x


def test_profile_balances_time():
    layers = [LayerSpec(Slow, size) for size in (160, 4, 4, 4, 4, 160)]
    settings = {"partition_method": "profile", "profile_input": torch.ones(1, 4)}
    found = staged(layers, lambda module: module.parts, stages=2, **settings)
    assert found[0] == found[1]
    assert 1 <= found[0][1] <= 5
    layers = [LayerSpec(Slow, size) for size in (4, 4, 4, 4, 4, 160)]
    assert staged(layers, lambda module: module.parts, stages=2, **settings)[0] == [0, 5, 6]


def test_gradients_are_as_before_a_measurement():
    block = Block(0)
    block.weight.grad = torch.full((4, 4), 7.0)
    measure(read_layers([block]), torch.ones(1, 4))
    assert block.weight.grad.eq(7).all()
    assert block.bias.grad is None


def test_a_layer_that_fails_on_the_sample_is_named():
    settings = {"partition_method": "profile", "profile_input": torch.ones(3, 5)}
    with pytest.raises(StageError, match=r"layer 1 \(Block\) fails on the sample: RuntimeError"):
        staged([nn.Identity(), *specs(1)], lambda module: module, **settings)


# -- tied weights ------------------------------------------------------------------------------------------------


class Random(nn.Module):
    """Weights that differ between ranks until they are tied."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x):
        return self.inner(x) * self.scale


def tied_layers(attr="inner.weight"):
    return [
        TiedLayerSpec("b", Random, tied_weight_attr=attr),
        LayerSpec(Block, 0),
        TiedLayerSpec("a", Random, tied_weight_attr="scale"),
        LayerSpec(Block, 1),
        TiedLayerSpec("b", Random, tied_weight_attr="scale"),
        TiedLayerSpec("a", Random, tied_weight_attr="inner.bias"),
    ]


def test_who_shares_what():
    def use(module):
        assert module.tied_keys() == ["a", "b"]
        return [
            (
                tied.key,
                tied.attrs,
                tied.stages,
                tied.is_owner,
                [name for name, _ in tied.params],
                tied.group and list(tied.group.ranks),
            )
            for tied in map(module.tied, module.tied_keys())
        ]

    found = staged(tied_layers(), use, stages=3, copies=2, partition_method="uniform")
    params = {key: [f"tied_modules.{key}.{name}" for name in ("scale", "inner.weight", "inner.bias")] for key in "ab"}
    a, b = ("a", ("inner.bias", "scale"), (1, 2)), ("b", ("inner.weight", "scale"), (0, 2))
    assert found[0] == [(*a, False, [], None), (*b, True, params["b"], [0, 4])]
    assert found[3] == [(*a, True, params["a"], [3, 5]), (*b, False, [], None)]
    assert found[5] == [(*a, False, params["a"], [3, 5]), (*b, False, params["b"], [1, 5])]


def test_tied_weights_start_equal():
    def use(module):
        return {name: tensor.clone() for name, tensor in module.state_dict().items() if name.startswith("tied")}

    found = staged(tied_layers(), use, stages=3, copies=2, partition_method="uniform")
    for copy in range(2):
        first, second, third = found[copy], found[2 + copy], found[4 + copy]
        assert len(first) == len(second) == 4
        assert len(third) == 8
        for name, tensor in {**first, **second}.items():
            assert torch.equal(tensor, third[name])


def test_gradients_of_tied_weights_are_summed():
    def use(module):
        for name, param in module.named_parameters():
            if not (name == "tied_modules.b.scale" and module.stage_id == 2) and not name.endswith("inner.bias"):
                param.grad = torch.full_like(param, 10.0**module.stage_id)
        module.allreduce_tied_weight_gradients()
        return {
            name: None if param.grad is None else param.grad.max().item() for name, param in module.named_parameters()
        }

    found = staged(tied_layers(), use, stages=3, partition_method="uniform")
    assert found[0]["tied_modules.b.inner.weight"] == found[2]["tied_modules.b.inner.weight"] == 101.0
    assert found[0]["tied_modules.b.scale"] == found[2]["tied_modules.b.scale"] == 1.0  # none on one stage is zero
    assert found[1]["tied_modules.a.scale"] == found[2]["tied_modules.a.scale"] == 110.0
    assert found[1]["tied_modules.a.inner.bias"] is None
    assert (found[0]["1.weight"], found[1]["3.weight"]) == (1.0, 10.0)


def test_weights_and_groups():
    def use(module):
        found = module.get_tied_weights_and_groups()
        return [(list(weight.shape), list(group.ranks)) for weight, group in found]

    found = staged(tied_layers(), use, stages=3, partition_method="uniform")
    assert found == [
        [([4, 4], [0, 2]), ([1], [0, 2])],
        [([4], [1, 2]), ([1], [1, 2])],
        [([4], [1, 2]), ([1], [1, 2]), ([4, 4], [0, 2]), ([1], [0, 2])],
    ]


def test_one_stage_has_nothing_to_sum():
    def use(module):
        module(torch.ones(1, 4)).sum().backward()
        before = module.tied_modules["a"].scale.grad.clone()
        module.allreduce_tied_weight_gradients()
        assert module.tied("a").group is None
        return module.get_tied_weights_and_groups(), torch.equal(module.tied_modules["a"].scale.grad, before)

    assert staged(tied_layers(), use, stages=1) == [([], True)]


def test_an_attribute_that_is_not_there():
    with pytest.raises(
        StageError, match="name the attribute 'weight', but Random has no such tensor; its parameters are: scale"
    ):
        staged(tied_layers("weight"), lambda module: module, stages=1)
