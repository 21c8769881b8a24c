"""Keyed permutations: one to one for every length, the same one by one and together, different by key."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.keyed_order import mix, permuted, seed_word


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2**64 - 1)), min_size=1, max_size=5))
def test_permutations_of_several_lengths_at_once_are_those_of_each_alone(ranges: list[tuple[int, int]]) -> None:
    offsets = np.concatenate([np.arange(length, dtype=np.uint64) for length, _ in ranges])
    counts = [length for length, _ in ranges]
    lengths, keys = (np.repeat(np.array(column, np.uint64), counts) for column in zip(*ranges, strict=True))
    together = np.split(permuted(offsets, lengths, keys), np.cumsum(counts)[:-1])
    for (length, key), found in zip(ranges, together, strict=True):
        assert sorted(found.tolist()) == list(range(length))
        alone = permuted(np.arange(length, dtype=np.uint64), np.uint64(length), np.full(length, key, np.uint64))
        assert found.tolist() == alone.tolist()


def test_long_ranges_stay_inside_and_keys_matter() -> None:
    offsets = np.arange(1000, dtype=np.uint64)
    for length in (2**40 + 3, 2**53 + 1, 2**62):
        keys = [mix(np.full(1000, seed_word(seed))) for seed in (1, 2)]
        found = [permuted(offsets, np.uint64(length), key) for key in keys]
        assert all(len(set(each.tolist())) == 1000 and each.max() < length for each in found)
        assert len(set(found[0].tolist()) & set(found[1].tolist())) == 0
