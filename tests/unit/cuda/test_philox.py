"""Random bits of dropouts."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native.cuda import philox


def test_known_answers():
    # Of the authors' known-answer file: philox4x32-10 for a counter and a key of zeros.
    assert philox.words(0, 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_do_not_depend_on_how_many_are_asked_for():
    assert torch.equal(philox.words(77, 1001), philox.words(77, 4096)[:1001])
    assert not torch.equal(philox.words(77, 64), philox.words(78, 64))


def test_words_use_both_halves_of_the_seed():
    assert not torch.equal(philox.words(5, 64), philox.words(5 + (1 << 40), 64))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9])
def test_share_of_what_stays(ratio):
    kept = philox.kept(3, 200_000, ratio).double().mean().item()
    assert kept == pytest.approx(1 - ratio, abs=5 * (ratio * (1 - ratio) / 200_000) ** 0.5 + 1e-12)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_ratio_that_cannot_be_is_refused(ratio):
    with pytest.raises(ValueError, match="dropout ratio"):
        philox.threshold(ratio)


def test_seeds_follow_the_generator_of_torch():
    x = torch.zeros(1)
    torch.manual_seed(4)
    first, second = philox.draw_seed(x), philox.draw_seed(x)
    torch.manual_seed(4)
    assert int(philox.draw_seed(x)) == int(first) != int(second)
