"""Patterns, ramp and order of pruning by sensitivity."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.blocks import MOST_OF_LAYER, Pattern, Ramp, rank_at, ranks_of


def alone(_):
    """Counts of one rank."""


def pruned_by(scores, share, gone=None):
    gone = torch.zeros(len(scores), dtype=torch.bool) if gone is None else gone
    ranks = ranks_of(scores, gone, 0)
    return ranks <= rank_at([ranks], Fraction(share), alone)


def test_blocks_are_tiles_of_outputs_and_inputs():
    weight = torch.arange(24.0).view(4, 6)
    groups = Pattern.parse("2x3").grouped(weight)
    assert groups.tolist() == [
        [0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11], [12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23],
    ]  # fmt: skip


def test_inputs_of_a_convolution_are_channels_of_one_place():
    """So that 2:4 is along what a product sums over first."""
    weight = torch.arange(2 * 4 * 3 * 3).view(2, 4, 3, 3)
    groups = Pattern.parse("2:4").grouped(weight)
    assert groups.shape == (18, 4)
    assert groups[1].tolist() == weight[0, :, 0, 1].tolist()


@given(
    st.sampled_from(["4x1", "1x1", "2x4", "2:4", "1:2", "3:4"]), st.sampled_from([(), (3, 2)]), st.integers(1, 3),
    st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_groups_go_back_to_their_places(text, kernel, rows, columns, is_transposed):
    pattern, out_dim = Pattern.parse(text), int(is_transposed and not kernel)
    outputs, inputs = rows * pattern.rows, columns * pattern.columns
    shape = (inputs, outputs) if out_dim else (outputs, inputs, *kernel)
    weight = torch.rand(shape)
    assert pattern.fits(shape, out_dim)
    groups = pattern.grouped(weight, out_dim)
    assert groups.shape == (weight.numel() // (pattern.rows * pattern.columns), pattern.rows * pattern.columns)
    assert torch.equal(pattern.ungrouped(groups, shape, out_dim), weight)


@pytest.mark.parametrize("text", ["4", "4x", "0x1", "x4", "4:4", "4:2", "a:b", ""])
def test_other_patterns_are_refused(text):
    with pytest.raises(ConfigError, match="expected NxM"):
        Pattern.parse(text)


def test_shapes_that_do_not_fit():
    assert not Pattern.parse("4x1").fits((10, 8))
    assert Pattern.parse("4x1").fits((8, 10))
    assert Pattern.parse("4x1").fits((10, 8), 1)
    assert not Pattern.parse("2:4").fits((8, 10))


def test_least_weights_of_a_run_go():
    doomed = Pattern.parse("2:4").doomed(torch.tensor([[3.0, 1, 2, 4], [5, 5, 5, 5]]))
    assert doomed.tolist() == [[False, True, True, False], [True, True, False, False]]
    assert Pattern.parse("4x1").doomed(torch.rand(3, 4)).all()


def test_ramp_is_cubic_and_ends_exactly():
    ramp = Ramp(0.4, 30, 90, 15)
    assert [step for step in range(1, 120) if ramp.is_due(step)] == [30, 45, 60, 75, 90]
    assert [float(ramp.sparsity(step)) for step in (30, 45, 60, 75, 90)] == pytest.approx(
        [0, 0.6 * (1 - 0.75**3), 0.6 * (1 - 0.5**3), 0.6 * (1 - 0.25**3), 0.6]
    )
    assert ramp.sparsity(90) == Fraction(6, 10)


def test_last_step_is_due_whatever_the_stride():
    assert [step for step in range(1, 20) if Ramp(0.1, 3, 10, 4).is_due(step)] == [3, 7, 10]
    assert [step for step in range(20) if Ramp(0.1, 5, 5, 1).is_due(step)] == [5]
    assert Ramp(0.1, 5, 5, 1).sparsity(5) == Fraction(9, 10)


@given(st.integers(1, 60), st.fractions(0, 1), st.integers(1, 5))
def test_exactly_the_share_with_the_least_scores_goes(count, share, different):
    """Also where many scores are equal, as those of layers that were not used."""
    scores = torch.randint(different, (count,)).float() / 3
    pruned = pruned_by(scores, share)
    assert int(pruned.sum()) == min(int(share * count), int(count * MOST_OF_LAYER))
    if pruned.any():
        assert scores[pruned].max() <= scores[~pruned].min()


def test_pruned_groups_stay_pruned():
    gone = torch.tensor([False, True, False, True, False])
    pruned = pruned_by(torch.tensor([1.0, 9, 2, 8, 3]), Fraction(3, 5), gone)
    assert pruned.tolist() == [True, True, False, True, False]


def test_one_threshold_over_layers_leaves_some_of_each():
    low, high = torch.rand(100), torch.rand(100) + 1
    gone = torch.zeros(100, dtype=torch.bool)
    layers = [ranks_of(low, gone, 1), ranks_of(high, gone, 2)]
    at = rank_at(layers, Fraction(1, 2), alone)
    assert [int((ranks <= at).sum()) for ranks in layers] == [98, 2]
    assert [int((ranks <= rank_at(layers, Fraction(1), alone)).sum()) for ranks in layers] == [98, 98]


def test_counts_of_other_ranks_count():
    """Each of three ranks counts its part; all come to the same number."""
    scores, gone = torch.rand(90), torch.zeros(90, dtype=torch.bool)
    ranks = ranks_of(scores, gone, 0)
    rounds = []
    want = rank_at([ranks], Fraction(1, 3), lambda counts: rounds.append(counts.clone()))

    def add_up(parts):
        def add(counts):
            parts.append(counts.clone())
            counts.copy_(rounds[len(parts) - 1])

        return add

    seen = [[], [], []]
    found = [rank_at([ranks[own::3]], Fraction(1, 3), add_up(seen[own])) for own in range(3)]
    assert found == [want] * 3
    assert all(torch.equal(sum(parts), whole) for parts, whole in zip(zip(*seen, strict=True), rounds, strict=True))
