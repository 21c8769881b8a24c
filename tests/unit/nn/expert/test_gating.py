"""Choices, capacities and balance losses against worked examples, in DeepSpeed's dense form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.compat.gating import top1gating, top2gating, topkgating
from mpispeed.nn.expert.sorted_plan import capacity_of

FOUR = [[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]]
SIX = [
    [0.5858, 0.4801, 0.6269, 0.5397, 0.9722, 0.7034],
    [0.5445, 0.6332, 0.4519, 0.6308, 0.0519, 0.6450],
    [0.4874, 0.8110, 0.7467, 0.8474, 0.0277, 0.3068],
    [0.8570, 0.6714, 0.5310, 0.3274, 0.4836, 0.9892],
]
NEGATIVE = [[-1.0, -2.0, -3.0], [-1.5, -0.5, -4.0], [-2.0, -1.0, -0.1]]
GOLDEN = [
    (FOUR, 2, "probs", {(0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 0), (3, 2, 1), (3, 3, 1)}),
    (FOUR, 2, "position", {(0, 1, 0), (0, 3, 0), (1, 0, 0), (1, 1, 1), (2, 2, 0), (2, 3, 1), (3, 2, 1)}),
    (
        SIX,
        3,
        "probs",
        {(0, 2, 0), (0, 4, 0), (0, 5, 0), (1, 3, 0), (2, 1, 0), (2, 2, 1), (2, 3, 1), (3, 0, 0), (3, 1, 1), (3, 5, 1)},
    ),
    (
        SIX,
        3,
        "position",
        {(0, 2, 0), (0, 4, 0), (0, 5, 0), (1, 1, 0), (1, 3, 0), (1, 5, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (3, 0, 0)},
    ),
    (NEGATIVE, 2, "probs", {(0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 1, 1), (2, 2, 0)}),
]


def cells(mask):
    return set(map(tuple, mask.nonzero().tolist()))


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("rows", "k", "policy", "expected"), GOLDEN)
def test_masks_of_worked_examples(rows, k, policy, expected, scale):
    logits = torch.tensor(rows) * scale
    tokens, experts = logits.shape
    # the factor at which every expert takes two
    _, weights, mask, _ = topkgating(logits, k, 2 * experts / tokens / k - 1e-6, 1, drop_policy=policy)
    assert mask.shape == (tokens, experts, 2)
    assert cells(mask) == expected
    assert (weights.sum((1, 2)) <= 1 + 1e-6).all()
    assert (mask.sum(0) <= 1).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "minimum", "capacity"),
    [(4, 4, 2, 1, 2), (4, 6, 3, 2, 2), (8, 4, 1, 4, 4), (100, 8, 1.25, 1, 16)],
)
def test_capacities_of_worked_examples(tokens, experts, factor, minimum, capacity):
    assert capacity_of(tokens, experts, factor, minimum) == capacity


def test_one_expert_keeps_the_first_tokens_and_their_gates():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    loss, weights, mask, counts = top1gating(logits, 1.0, 1, use_rts=False)
    gates = logits.softmax(-1)
    assert cells(mask) == {(0, 0, 0), (1, 0, 1), (3, 1, 0)}
    assert torch.equal(weights[0, 0, 0], gates[0, 0])
    assert counts.tolist() == [3, 1]
    expected = 2 * (gates.mean(0) * torch.tensor([0.75, 0.25])).sum()
    torch.testing.assert_close(loss, expected)


def test_random_selection_keeps_as_many_as_fit_and_not_always_the_first():
    logits = torch.tensor([[1.0, 0.0]]).repeat(64, 1)
    kept = [top1gating(logits, 1.0, 1)[2][:, 0].any(-1) for _ in range(3)]
    assert all(int(each.sum()) == 32 for each in kept)
    assert any(not each[:32].all() for each in kept)


def test_unused_tokens_go_nowhere_and_do_not_count():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    _, _, mask, counts = top1gating(logits, 4.0, 1, torch.tensor([1, 0, 1, 1]), use_rts=False)
    assert cells(mask) == {(0, 0, 0), (2, 0, 1), (3, 1, 0)}
    assert counts.tolist() == [2, 1]


def test_second_choices_come_behind_all_first_choices():
    logits = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 2.0, 1.0]])
    loss, weights, mask, counts = top2gating(logits, 1.0, 1, top2_2nd_expert_sampling=False)
    assert cells(mask) == {(0, 0, 0), (1, 1, 0), (2, 1, 1), (1, 0, 1), (2, 2, 0)}
    gates = logits.softmax(-1)
    assert weights[0, 0, 0] == 1.0  # its second choice found expert 1 full
    torch.testing.assert_close(weights[1, 1, 0], gates[1, 1] / (gates[1, 1] + gates[1, 0]))
    assert counts.tolist() == [2, 3, 1]
    torch.testing.assert_close(loss, 3 * (gates.mean(0) * torch.tensor([1 / 3, 2 / 3, 0.0])).sum())


def test_balance_loss_of_many_experts_for_each_token():
    logits = torch.tensor(SIX)
    loss, _, _, counts = topkgating(logits, 3, 1.0, 1)
    expected = 6 / 3 * (logits.softmax(-1).mean(0) * counts / 4).sum()
    torch.testing.assert_close(loss, expected)


def test_sampling_changes_no_logits():
    logits = torch.randn(32, 8)
    before = logits.clone()
    top2gating(logits, 1.0, 1)
    top1gating(logits, 1.0, 1, noisy_gate_policy="RSample")
    assert torch.equal(logits, before)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_nothing_is_dropped_if_so_asked(k):
    logits = torch.randn(16, 5, generator=torch.Generator().manual_seed(k))
    _, weights, mask, counts = topkgating(logits, k, 1.0, 1, drop_tokens=False)
    assert mask.sum((1, 2)).tolist() == [k] * 16
    assert mask.shape[2] == counts.max()
    assert counts.sum() == 16 * k
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(16))


def test_a_large_factor_keeps_all_of_few_tokens():
    _, _, mask, _ = top1gating(torch.randn(2, 4), 100.0, 4)
    assert mask.sum() == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(1, 6), st.data())
def test_capacity_holds_and_leaves_no_place_unused(tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    policy = data.draw(st.sampled_from(["probs", "position"]))
    factor = data.draw(st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens * 31 + experts))
    _, weights, mask, counts = topkgating(logits, k, factor, 1, drop_policy=policy)
    capacity = capacity_of(tokens, experts, factor * k, 1)
    assert mask.sum((0, 2)).tolist() == [min(count, capacity) for count in counts.tolist()]
    assert (mask.sum(0) <= 1).all()
    assert weights.isfinite().all()


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="drop_policy = 'first' is unknown"):
        topkgating(torch.randn(2, 2), 2, 1.0, 1, drop_policy="first")
