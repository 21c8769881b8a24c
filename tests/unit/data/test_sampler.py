"""Sample order: values that must never change, evenness of the shuffle, slices of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpispeed.data.sampler import RankBatches, SampleOrder


def test_the_order_is_frozen() -> None:
    """A checkpoint names a position only; another order after an upgrade would be another run."""
    order = SampleOrder(10, seed=1234, shuffle=True)
    assert order.indices(range(20)) == [1, 6, 5, 3, 9, 0, 7, 8, 4, 2, 1, 5, 3, 7, 4, 8, 6, 0, 2, 9]


def test_unshuffled_order_repeats() -> None:
    assert SampleOrder(3, seed=5, shuffle=False).indices(range(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(50, seed=1, shuffle=True)
    first, second = order.indices(range(50)), order.indices(range(50, 100))
    other = SampleOrder(50, seed=2, shuffle=True).indices(range(50))
    assert first != second
    assert first != other
    assert first != list(range(50))


@pytest.mark.parametrize("length", [5, 12, 97])
def test_every_sample_is_equally_likely_at_every_place(length: int) -> None:
    epochs = 200 * length
    order = SampleOrder(length, seed=3, shuffle=True)
    for place in (0, length // 2, length - 1):
        found = np.bincount(order.indices(range(place, epochs * length, length)), minlength=length)
        chi2 = float(((found - 200.0) ** 2 / 200.0).sum())
        # Chi-square with n - 1 degrees: mean n - 1, variance 2(n - 1); six deviations are never chance.
        assert chi2 < (length - 1) + 6 * (2 * (length - 1)) ** 0.5


def test_neighbours_of_a_large_epoch_are_unrelated() -> None:
    order = SampleOrder(10**9 + 7, seed=0, shuffle=True)
    found = np.array(order.indices(range(5000)), dtype=float)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.06  # four deviations of 1 / sqrt(5000)
    assert abs(found.mean() / 1e9 - 0.5) < 0.02


def test_positions_out_of_range_are_refused() -> None:
    with pytest.raises(IndexError, match="position -1"):
        SampleOrder(3, seed=0, shuffle=True).index(-1)
    with pytest.raises(IndexError, match="0 samples"):
        SampleOrder(0, seed=0, shuffle=True).index(0)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(-1, seed=0, shuffle=True)
    assert SampleOrder(0, seed=0, shuffle=True).indices([]) == []


def test_ranks_take_consecutive_slices_and_wrap_at_the_end() -> None:
    order = SampleOrder(10, seed=0, shuffle=False)
    parts = [
        list(RankBatches(order, epoch=2, offset=4, count=2, micro_batch=2, rank=rank, size=2)) for rank in range(2)
    ]
    assert parts == [[[4, 5], [8, 9]], [[6, 7], [0, 1]]]
