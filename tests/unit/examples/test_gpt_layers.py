"""The layers of the example's pipeline are its GPT, cut between the blocks."""

from __future__ import annotations

import pytest
import torch
from gpt import GPT, Shape
from gpt_layers import as_gpt, cross_entropy, layers, scores

SHAPE = Shape(layers=3, heads=2, width=16, block=12)


def test_in_a_row_they_compute_what_the_model_does() -> None:
    torch.manual_seed(0)
    row = [spec.build() for spec in layers(SHAPE)]
    weights = {f"{index}.{name}": x for index, layer in enumerate(row) for name, x in layer.state_dict().items()}
    model = GPT(SHAPE)
    model.load_state_dict(as_gpt(weights, SHAPE))
    x = torch.randint(0, 256, (2, 12))
    hidden = x
    for layer in row:
        hidden = layer(hidden)
    assert torch.equal(hidden, model(x))
    assert torch.equal(cross_entropy(hidden, x), model(x, x))


def test_they_are_initialised_as_the_model_is() -> None:
    torch.manual_seed(0)
    row, model = [spec.build() for spec in layers(SHAPE)], GPT(SHAPE)
    weights = {f"{index}.{name}": x for index, layer in enumerate(row) for name, x in layer.state_dict().items()}
    theirs = model.state_dict()
    for name, ours in as_gpt(weights, SHAPE).items():
        assert float(ours.std()) == pytest.approx(float(theirs[name].std()), rel=0.2, abs=1e-6), name


def test_ends_that_are_tied_share_one_table() -> None:
    specs = layers(SHAPE, is_tied=True)
    table, x = specs[0].build(), torch.randn(2, 5, 16)
    assert specs[0].key == specs[-1].key
    assert specs[-1].forward_fn is scores
    torch.testing.assert_close(scores(table, x), x @ table.weight.t())
