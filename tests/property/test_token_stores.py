"""Arithmetic of token stores over many sizes: shares, splits, blends, windows and packed rows."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.tokens.blend import BLOCK, TokenBlend
from mpispeed.tokens.layout import LOOKUP_TOKENS
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.samples import BatchedSamples
from mpispeed.tokens.splits import largest_remainder, split_range
from mpispeed.tokens.store import open_store
from mpispeed.tokens.windows import TokenWindows
from tests.helpers.token_stores import make_store

WEIGHTS = st.lists(st.floats(0, 1e6) | st.integers(0, 100), min_size=1, max_size=8).filter(any)


@given(total=st.integers(0, 1 << 62), weights=WEIGHTS)
def test_shares_are_whole_add_up_and_are_less_than_one_off(total: int, weights: list[float]) -> None:
    counts = largest_remainder(total, weights)
    assert sum(counts) == total
    whole = sum(map(Fraction, weights))
    assert all(abs(count - total * Fraction(weight) / whole) < 1 for count, weight in zip(counts, weights, strict=True))


@given(count=st.integers(1, 1 << 40), weights=WEIGHTS)
def test_parts_of_a_split_lie_one_behind_the_other(count: int, weights: list[float]) -> None:
    ends = [0]
    for part in range(len(weights)):
        try:
            begin, stop = split_range(count, weights, part)
        except ConfigError:
            continue  # so small a share that it is empty
        assert begin == ends[-1] < stop
        ends.append(stop)
    assert ends[-1] == count


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_weights_without_proportions_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="no proportions"):
        largest_remainder(10, weights)


class Numbers(BatchedSamples):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def _read(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        return {"number": torch.from_numpy(numbers)[:, None]}


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    first=st.integers(0, 3 * BLOCK),
    count=st.integers(1, 3000),
    lengths=st.lists(st.integers(1, 5000), min_size=6, max_size=6),
)
def test_a_blend_takes_every_data_set_in_order_and_evenly(
    weights: list[float], first: int, count: int, lengths: list[int]
) -> None:
    blend = TokenBlend(
        [(Numbers(length), weight) for length, weight in zip(lengths, weights, strict=False)], length=1 << 40
    )
    assert blend.counts.sum() == BLOCK
    chosen, own = blend.locate(np.arange(first, first + count))
    before = (blend.locate(np.arange(first))[0][:, None] == np.arange(len(weights))).sum(0)
    for number, length in enumerate(lengths[: len(weights)]):
        mine = own[chosen == number]
        assert np.array_equal(mine, (before[number] + np.arange(len(mine))) % length)
        share = blend.counts[number] / BLOCK
        seen = before[number] + np.cumsum(chosen == number)
        assert np.abs(seen - share * np.arange(first + 1, first + count + 1)).max() <= 1 + len(weights) / 2
    batch = blend.read_batch(range(first, first + count))["number"][:, 0].numpy()
    assert np.array_equal(batch, own)


@settings(max_examples=15, deadline=None)
@given(
    documents=st.integers(1, 60),
    longest=st.integers(1, 3 * LOOKUP_TOKENS // 20),
    length=st.integers(1, 700),
    seed=st.integers(0, 99),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_windows_and_rows_are_those_of_the_definition(
    documents: int, longest: int, length: int, seed: int, weights: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        made = make_store(
            Path(folder) / "s.h5", documents=documents, longest=longest, row_length=longest + 7, seed=seed
        )
        owner = np.searchsorted(made.begins, np.arange(len(made.tokens)), side="right") - 1
        with open_store(made.path) as store:
            for part in range(len(weights)):
                try:
                    begin, stop = split_range(documents, weights, part)
                    samples = TokenWindows(store, length, split=weights, part=part, documents=True)
                except ConfigError:
                    continue
                start, end = made.begins[begin], made.begins[stop]
                assert len(samples) == (end - start - 1) // length
                batch = samples.read_batch(range(len(samples)))
                places = start + np.arange(len(samples) * length).reshape(len(samples), length)
                assert np.array_equal(batch["input_ids"].numpy(), made.tokens[places])
                crossing = owner[places] != owner[places + 1]
                assert np.array_equal(batch["labels"].numpy(), np.where(crossing, -100, made.tokens[places + 1]))
                assert np.array_equal(batch["document_ids"].numpy(), owner[places] - owner[places[:, :1]])
            rows = TokenRows(store)
            assert made.rows is not None
            batch = rows.read_batch(range(len(rows)))
            for number, (first, stop) in enumerate(pairwise(made.rows.tolist())):
                inside = made.tokens[made.begins[first] : made.begins[stop]]
                assert batch["input_ids"][number, : len(inside)].tolist() == inside.tolist()
                assert (batch["labels"][number] != -100).sum() == len(inside) - (stop - first)
