"""Progressive layer drop: schedule, decisions, layers that are left out, and the pass that runs."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.passes import Pass, Passes
from mpispeed.engine.layer_drop import units_of
from mpispeed.native.cuda import launcher
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from mpispeed.nn.layer_drop import ProgressiveLayerDrop, convert_to_layer_drop
from mpispeed.nn.layer_drop.decisions import Depth, LayerDrop, number_layers
from mpispeed.nn.layer_drop.layers import find_droppable, make_droppable, take_part
from mpispeed.sharding.units import plan_units
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits


class Residual(nn.Module):
    """A layer that counts its runs."""

    def __init__(self, width=4):
        super().__init__()
        self.inner, self.runs = nn.Linear(width, width), 0

    def forward(self, x, *others):
        self.runs += 1
        out = x + torch.tanh(self.inner(x))
        return (out, *others) if others else out


class Tuple(Residual):
    def forward(self, x, mask=None):
        return super().forward(x), mask


def stack(count=4, kind=Residual):
    torch.manual_seed(0)
    return convert_to_layer_drop(nn.Sequential(*(kind() for _ in range(count))), kind)


def taking(model, theta=0.5, seed=1):
    """The decisions about a model, with theta at its limit."""
    drop = LayerDrop(ProgressiveLayerDrop(theta), Passes(), seed)
    drop.passes.is_watched, drop.schedule.current_theta = True, theta
    found = find_droppable(model)
    depths = number_layers(found)
    end = take_part({layer: depths[name] for name, layer in found.items()}, drop)
    return drop, end


def pass_with(drop, layers, *, kept):
    """A pass that keeps, of so many layers, just those."""
    depths = [Depth(number, number + 1, layers) for number in range(layers)]
    every = (Pass(1, micro) for micro in range(10_000))
    return next(one for one in every if [drop.is_kept(depth, one) for depth in depths] == kept)


@pytest.mark.parametrize("theta", [0, 0.1, 0.9, 1.0])
def test_schedule_is_the_formula(theta):
    """As DeepSpeed's own test asks."""
    schedule = ProgressiveLayerDrop(theta)
    assert schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in range(300):
        schedule.update_state(step)
        assert schedule.get_theta() == (1.0 - theta) * np.exp(-0.001 * step) + theta
    assert (schedule.theta, schedule.gamma, ProgressiveLayerDrop().theta) == (theta, 0.001, 0.5)


def test_probability_falls_along_the_depth_to_theta():
    drop = LayerDrop(ProgressiveLayerDrop(0.5), Passes(), 1)
    drop.schedule.current_theta = 0.6
    found = [drop.probability(Depth(0, index, 4)) for index in (1, 2, 3, 4)]
    assert found == pytest.approx([0.9, 0.8, 0.7, 0.6])


def test_decisions_are_as_often_as_their_probability_and_stay_as_they_are():
    drop = LayerDrop(ProgressiveLayerDrop(0.5), Passes(), 1)
    drop.schedule.current_theta = 0.5
    count = 4000
    for index in (1, 3, 4):
        depth = Depth(index, index, 4)
        kept = [drop.is_kept(depth, Pass(step, micro)) for step in range(count // 2) for micro in (0, 1)]
        p = drop.probability(depth)
        assert abs(sum(kept) / count - p) < 4 * math.sqrt(p * (1 - p) / count)
    words = ["".join("01"[drop.is_kept(Depth(n, n + 1, 8), Pass(step, micro))] for n in range(8))
             for step in (1, 2) for micro in (0, 1)]  # fmt: skip
    assert words == ["11011110", "11101011", "11111000", "11111011"]
    assert drop.is_kept(Depth(7, 8, 8), Pass(1, 0, is_training=False))


def test_layers_are_numbered_in_the_order_of_their_stacks():
    names = ["decoder.layers.0", "encoder.layers.10.block", "encoder.layers.9.block", "decoder.layers.1", "3", "12"]
    assert number_layers(names) == {
        "3": Depth(0, 1, 2), "12": Depth(1, 2, 2), "decoder.layers.0": Depth(2, 1, 2),
        "decoder.layers.1": Depth(3, 2, 2), "encoder.layers.9.block": Depth(4, 1, 2),
        "encoder.layers.10.block": Depth(5, 2, 2),
    }  # fmt: skip


def test_a_layer_is_left_out_or_scaled():
    model = stack(2)
    drop, end = taking(model)
    x = torch.randn(3, 4)
    first, second = model
    whole = model.eval()(x)
    model.train()
    drop.passes.begin(pass_with(drop, 2, kept=[True, False]))
    runs = first.runs, second.runs
    out = model(x)
    assert (first.runs, second.runs) == (runs[0] + 1, runs[1])
    torch.testing.assert_close(out, x + (whole_of(first, x) - x) / 0.75)
    out.sum().backward()
    assert second.inner.weight.grad is None
    drop.passes.begin(Pass(1, 0, is_training=False))
    same_bits(model(x), whole)
    end()
    drop.passes.begin(pass_with(drop, 2, kept=[False, False]))
    same_bits(model(x), whole)


def whole_of(layer, x):
    return x + torch.tanh(layer.inner(x))


def test_tuples_hand_the_others_through():
    model = stack(1, Tuple)
    drop, _ = taking(model)
    x, mask = torch.randn(3, 4), torch.ones(3)
    for kept in ([False], [True], [False]):  # at first nothing is known of what the layer returns
        drop.passes.begin(pass_with(drop, 1, kept=kept))
        state = torch.get_rng_state()
        out, handed = model[0](x, mask=mask)
        same_bits(torch.get_rng_state(), state)
        assert handed is mask
        assert (out is x) == (not kept[0])


def test_what_is_handed_through_hangs_on_how_a_layer_is_called():
    drop, _ = taking(model := stack(1, Tuple))
    drop.passes.begin(pass_with(drop, 1, kept=[False]))
    x, mask = torch.randn(3, 4), torch.ones(3)
    for args, kwargs, wanted in (((x,), {}, None), ((x,), {"mask": mask}, mask), ((x, mask), {}, mask),
                                 ((x, None), {}, None), ((x, mask), {}, mask)):  # fmt: skip
        out, handed = model[0](*args, **kwargs)
        assert out is x and handed is wanted


@pytest.mark.parametrize("out", [lambda x: x[:, :2], lambda x: [x], lambda x: (x, x * 2)])
def test_layers_of_another_kind_are_refused(out):
    class Other(nn.Module):
        def forward(self, x):
            return out(x)

    drop, _ = taking(model := convert_to_layer_drop(nn.Sequential(Other()), Other))
    drop.passes.begin(pass_with(drop, 1, kept=[True]))
    with pytest.raises(UsageError, match="type Other cannot be left out by progressive layer drop"):
        model(torch.ones(2, 4))


def test_a_weight_that_is_tied_to_one_outside_is_always_expected():
    model = nn.Sequential(nn.Linear(4, 4), *stack(3))
    model[2].inner.bias = model[0].bias
    model[3].inner.weight = model[1].inner.weight
    table = plan_units(model, {id(param): 0 for param in model.parameters()}, 1, 1)
    depths = [Depth(number, number + 1, 3) for number in range(3)]
    found = units_of(table, model, dict(zip(list(model)[1:], depths, strict=True)))
    users = {name: set(found.get(table.by_name(name).unit.index, ())) for name, _ in model.named_parameters()}
    own = {"1.inner.weight": {0, 2}, "1.inner.bias": {0}, "2.inner.weight": {1}, "3.inner.bias": {2}}
    assert users == {"0.weight": set(), "0.bias": set(), **own}


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="a Sequential, has no layer of the type Residual"):
        convert_to_layer_drop(nn.Sequential(nn.Linear(2, 2)), Residual)


def test_a_converted_layer_is_what_it_was():
    plain, layer = Residual(), Residual()
    layer.load_state_dict(plain.state_dict())
    make_droppable(layer)
    make_droppable(layer)
    assert isinstance(layer, Residual) and type(layer).__name__ == "Residual"
    assert list(layer.state_dict()) == list(plain.state_dict())
    drop, _ = taking(nn.Sequential(layer), theta=0.0)
    drop.passes.begin(Pass(1, 0))
    x = torch.randn(2, 4)
    assert layer(x) is x
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        same_bits(other(x), plain(x))  # a copy takes no part


RECOMPUTE = {
    "own": lambda f, *x: checkpointing.checkpoint(f, *x),
    "torch": lambda f, *x: torch_checkpoint.checkpoint(f, *x, use_reentrant=False),
    "reentrant": lambda f, *x: torch_checkpoint.checkpoint(f, *x, use_reentrant=True),
}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_decides_as_the_first_run(name):
    """Two passes are under way at once, and the first goes back while the second is the current one."""
    recompute, outcomes = RECOMPUTE[name], []
    for run in (lambda f, *x: f(*x), recompute):
        model = stack()
        drop, _ = taking(model)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
        losses = []
        for kept in ([True, False, True, True], [False, True, True, False]):
            drop.passes.begin(pass_with(drop, 4, kept=kept))
            out = run(model, x).square().sum()
            drop.passes.end({"loss": (out,)})
            losses.append(out)
        grads = [[grad.clone() for grad in grads_of(loss, model, x)] for loss in losses]
        outcomes.append([*losses, *grads[0], *grads[1]])
    same_bits(*outcomes)


def grads_of(loss, model, x):
    model.zero_grad(set_to_none=False)
    x.grad = None
    loss.backward()
    return [x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


def transformer(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    layer = TransformerLayer(TransformerConfig(**sizes, initializer_range=0.2, **changes))
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return layer.to(dtype)


@pytest.mark.parametrize("is_pre", [True, False])
def test_both_branches_of_a_transformer_layer_are_scaled(is_pre):
    layer = transformer(pre_layer_norm=is_pre)
    x = torch.randn(2, 5, 32)
    scaled = transformer(pre_layer_norm=is_pre)
    with torch.no_grad():
        for weight in (scaled.attn_ow, scaled.attn_ob, scaled.output_w, scaled.output_b):
            weight.mul_(1.6)
    torch.testing.assert_close(layer(x, residual_scale=1.6), scaled(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("is_pre", "ratio"), [(True, 0.0), (True, 0.2), (False, 0.2)])
def test_kernels_scale_with_the_bits_of_the_composed_layer(is_pre, ratio, dtype, monkeypatch):
    layer = transformer(dtype, pre_layer_norm=is_pre, attn_dropout_ratio=ratio, hidden_dropout_ratio=ratio)
    x = torch.randn(2, 21, 32, generator=torch.Generator().manual_seed(1)).to(dtype)

    def outcome():
        torch.manual_seed(7)
        given = x.clone().requires_grad_()
        out = layer(given, residual_scale=1 / 0.7)
        return [out, *torch.autograd.grad(out.square().sum(), [given, *layer.parameters()])]

    with launcher.standing_in(HostLauncher()):
        found = outcome()
        monkeypatch.setattr("mpispeed.nn.block.at_once.passes_for", lambda *_, **__: None)
        same_bits(found, outcome())


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_a_transformer_layer_is_left_out_as_it_returns(returns_tuple):
    layer = transformer(return_tuple=returns_tuple)
    make_droppable(layer)
    drop, _ = taking(nn.Sequential(layer), theta=0.0)
    drop.passes.begin(Pass(1, 0))
    x = torch.randn(2, 5, 32)
    out = layer(hidden_states=x)
    assert (out[0] is x and len(out) == 1) if returns_tuple else out is x
