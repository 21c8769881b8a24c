"""Masks: how many stay, which ones, how they lie on weights, how scores learn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.nn.compression.masks import initial_scores, kept_count, l1_scores, mask_shape, spread, top_k_mask


@pytest.mark.parametrize(
    ("count", "ratio", "kept"),
    [(10, 0.5, 5), (10, 0.51, 6), (100, 0.55, 55), (12, 0.25, 3), (3, 0.01, 1), (7, 0.99, 7)],
)
def test_ratios_are_decimal_and_rounded_up(count, ratio, kept):
    assert kept_count(count, ratio) == kept


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=24), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_the_largest_stay_and_the_first_of_equal_ones(values, ratio):
    scores = torch.tensor(values, dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    expected = torch.zeros(len(values))
    expected[order[: kept_count(len(values), ratio)]] = 1
    assert torch.equal(top_k_mask(scores, ratio), expected)


def test_gradients_of_a_mask_are_those_of_its_scores():
    scores = torch.tensor([[0.1], [0.9], [0.5]], requires_grad=True)
    factor = torch.tensor([[2.0], [3.0], [5.0]])
    mask = top_k_mask(scores, 0.5)
    assert mask.view(-1).tolist() == [0, 1, 1]
    (mask * factor).sum().backward()
    assert torch.equal(scores.grad, factor)


def test_scores_of_magnitudes():
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 0.5, -0.5, 4.0]])
    assert torch.equal(l1_scores("sparse", weight, 0), weight.abs())
    assert l1_scores("row", weight, 0).tolist() == [[6.0], [5.5]]
    assert l1_scores("row", weight.t(), 1).tolist() == [[6.0], [5.5]]
    assert l1_scores("head", weight, 0, 2).tolist() == [[4.0, 7.5]]
    assert l1_scores("head", weight.t(), 1, 2).tolist() == [[4.0, 7.5]]
    filters = torch.arange(8.0).view(2, 1, 2, 2)
    assert l1_scores("channel", filters, 0).flatten().tolist() == [6.0, 22.0]


@pytest.mark.parametrize("out_dim", [0, 1])
def test_how_masks_lie_on_weights(out_dim):
    weight = torch.ones(2, 4) if out_dim == 0 else torch.ones(4, 2)
    rows = weight * spread("row", torch.tensor([[0.0], [1.0]]), weight, out_dim)
    heads = weight * spread("head", torch.tensor([[1.0, 0.0]]), weight, out_dim)
    rows, heads = (each if out_dim == 0 else each.t() for each in (rows, heads))
    assert rows.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert heads.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "weight", "shape"),
    [
        ("sparse", (6, 4), (6, 4)),
        ("row", (6, 4), (6, 1)),
        ("head", (6, 4), (1, 2)),
        ("channel", (6, 4, 3, 3), (6, 1, 1, 1)),
        ("sparse", (6, 4, 3, 3), (6, 4, 3, 3)),
    ],
)
def test_first_scores_are_uniform_and_hang_on_their_key(kind, weight, shape):
    assert mask_shape(kind, weight, 0, 2) == shape
    scores = initial_scores(shape, 5, torch.float32, torch.device("cpu"))
    assert scores.shape == shape
    assert scores.abs().max() <= 1 / math.sqrt(math.prod(shape[1:]))
    assert torch.equal(scores, initial_scores(shape, 5, torch.float32, torch.device("cpu")))
    assert not torch.equal(scores, initial_scores(shape, 6, torch.float32, torch.device("cpu")))
