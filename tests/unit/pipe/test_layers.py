"""Specs of layers: what they keep, build and refuse, and how inputs reach a layer."""

import functools

import pytest
import torch
from torch import nn

from mpispeed.base.errors import StageError
from mpispeed.pipe import LayerSpec, TiedLayerSpec, spread
from mpispeed.pipe.layers import call, name_of, read_layers


def test_a_spec_builds_its_module_each_time():
    spec = LayerSpec(nn.Linear, 3, 2, bias=False)
    one, two = spec.build(), spec.build(log=True)
    assert one is not two
    assert (one.in_features, one.out_features, one.bias) == (3, 2, None)
    assert (spec.typename, spec.module_args, spec.module_kwargs) == (nn.Linear, (3, 2), {"bias": False})


def test_text_of_specs():
    assert repr(LayerSpec(nn.Linear, 3, 2, bias=False)) == "LayerSpec(Linear, 3, 2, bias=False)"
    assert repr(TiedLayerSpec("embed", nn.Embedding, 8, 4)) == "TiedLayerSpec('embed', Embedding, 8, 4)"


def test_tied_specs():
    spec = TiedLayerSpec("embed", nn.Embedding, 8, 4, padding_idx=0)
    assert (spec.key, spec.forward_fn, spec.tied_weight_attr) == ("embed", None, ["weight"])
    assert spec.build().padding_idx == 0
    assert TiedLayerSpec("k", nn.Linear, 1, 1, tied_weight_attr="bias").tied_weight_attr == ["bias"]
    assert TiedLayerSpec("k", nn.Linear, 1, 1, tied_weight_attr=["weight", "bias"]).tied_weight_attr == [
        "weight",
        "bias",
    ]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LayerSpec(torch.relu), "no subclass of torch.nn.Module"),
        (lambda: LayerSpec(int), "no subclass of torch.nn.Module"),
        (lambda: LayerSpec(nn.Linear(1, 1)), "no subclass of torch.nn.Module"),
        (lambda: TiedLayerSpec("a.b", nn.Linear, 1, 1), "without dots"),
        (lambda: TiedLayerSpec("pop", nn.Linear, 1, 1), "no method of nn.ModuleDict"),
        (lambda: TiedLayerSpec(3, nn.Linear, 1, 1), "without dots"),
        (lambda: read_layers([]), "is empty"),
        (lambda: read_layers(nn.Linear(1, 1)), "the layers are a Linear; pass a list"),
        (lambda: read_layers([nn.Identity(), nn.ReLU]), "layer 1 is the class ReLU"),
        (lambda: read_layers([3]), "layer 0 is 3"),
        (
            lambda: read_layers([TiedLayerSpec("k", nn.Linear, 1, 1), TiedLayerSpec("k", nn.Embedding, 1, 1)]),
            "layers 0 and 1 are tied as 'k' but are of the types Linear and Embedding",
        ),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(StageError, match=text) as raised:
        make()
    assert isinstance(raised.value, RuntimeError)


def test_all_kinds_are_numbered():
    given = [
        LayerSpec(nn.Linear, 1, 1),
        nn.Identity(),
        torch.relu,
        lambda x: x,
        functools.partial(torch.flatten, start_dim=1),
    ]
    layers = read_layers(iter(given))
    assert [layer.index for layer in layers] == list(range(5))
    assert [layer.name for layer in layers] == ["Linear", "Identity", "relu", "<lambda>", "flatten"]
    assert read_layers(nn.Sequential(nn.ReLU(), nn.Tanh()))[1].name == "Tanh"


class Callable:
    def __call__(self, x):
        return x


def test_names_of_objects_that_can_be_called():
    assert name_of(Callable()) == "Callable"


def test_inputs_are_one_object_unless_they_are_spread():
    pair = (torch.ones(1), torch.zeros(1))
    assert call(lambda x: x, pair, spreads=False) is pair
    assert call(lambda x, y: (y, x), pair, spreads=True) == (pair[1], pair[0])
    assert call(lambda x, y: (y, x), list(pair), spreads=True) == (pair[1], pair[0])
    assert call(lambda hidden, mask: mask, {"hidden": 1, "mask": 2}, spreads=True) == 2
    assert call(lambda x: x, pair[0], spreads=True) is pair[0]


def test_marks_for_spread_inputs():
    layers = read_layers([spread(torch.add), LayerSpec(nn.Bilinear, 2, 2, 2, spreads_inputs=True), nn.Identity()])
    assert [layer.spreads for layer in layers] == [True, True, False]
    assert layers[0].source is torch.add
