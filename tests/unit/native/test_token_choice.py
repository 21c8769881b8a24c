"""Tokens chosen by a key: the compiled loop beside its reference; samples in any batch; likelihoods."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native import status
from mpispeed.native.token_choice import choose, choose_reference, key_of

HOST = torch.device("cpu")


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 4),
    st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted),
)
def test_the_loop_and_its_reference_choose_alike(key, first, batch, counts):
    count, tokens = counts
    ours = choose(key, first, batch, tokens, count, HOST)
    assert status.found("token_choice") is not None
    assert torch.equal(ours, choose_reference(key, first, batch, tokens, count, HOST))
    assert ours.shape == (batch, count) and ours.dtype == torch.int32
    if count and batch:
        assert ours.min() >= 0 and ours.max() < tokens
        assert bool((ours[:, 1:] > ours[:, :-1]).all())


def test_many_tokens():
    ours = choose(7, 3, 2, 70_000, 35_001, HOST)
    assert torch.equal(ours, choose_reference(7, 3, 2, 70_000, 35_001, HOST))


def test_a_sample_has_its_places_in_any_batch():
    whole = choose(key_of(1, 2), 10, 6, 50, 20, HOST)
    parts = [choose(key_of(1, 2), first, count, 50, 20, HOST) for first, count in ((10, 1), (11, 3), (14, 2))]
    assert torch.equal(whole, torch.cat(parts))
    assert len({tuple(row) for row in whole.tolist()}) == 6


def test_keys_tell_the_order_and_the_number_of_their_parts():
    keys = [key_of(*parts) for parts in ((), (0,), (0, 0), (1, 2), (2, 1), (-1,), (2**64 - 1, 0))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert key_of(3, 4) != key_of(3, 5) and key_of(3, 4) == key_of(3, 4)


def test_all_places_and_pairs_are_alike_likely():
    # 20,000 draws of 3 of 8: a place is drawn 7,500 times, a pair 2,143 times; bounds of six standard deviations
    drawn = torch.zeros(20_000, 8).scatter_(1, choose(key_of(5), 0, 20_000, 8, 3, HOST).long(), 1)
    pairs = drawn.t() @ drawn
    assert (pairs.diagonal() - 7500).abs().max() < 6 * (20_000 * 3 / 8 * 5 / 8) ** 0.5
    apart = pairs[~torch.eye(8, dtype=torch.bool)]
    assert (apart - 20_000 * 3 / 28).abs().max() < 6 * (20_000 * 3 / 28) ** 0.5


@pytest.mark.parametrize(("tokens", "count"), [(4, 5), (4, -1), (1 << 31, 1)])
def test_counts_that_do_not_fit_are_refused(tokens, count):
    with pytest.raises(ValueError, match=f"{count} of {tokens} tokens"):
        choose(0, 0, 1, tokens, count, HOST)
