"""Owners of matrices: balanced, alike on all ranks, and rounds of bounded size."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mpispeed.plan.matrix_owners import MATRICES_UNDER_WAY, deal, rounds_of, work_of

GPT = [work_of(*shape) for shape in [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12]


def test_a_gpt_is_balanced() -> None:
    for ranks in (1, 2, 3, 4, 6, 8, 12):
        assert deal(GPT, ranks).imbalance <= 1.1


@given(st.lists(st.integers(1, 50), max_size=7), st.integers(1, 3))
def test_the_largest_load_is_near_the_least_possible(works: list[int], owners: int) -> None:
    found = deal([float(work) for work in works], owners)
    assert sum(found.loads) == sum(works)
    for owner, load in enumerate(found.loads):
        assert load == sum(work for work, own in zip(works, found.owners, strict=True) if own == owner)
    best = min(
        max(sum(work for work, at in zip(works, choice, strict=True) if at == owner) for owner in range(owners))
        for choice in itertools.product(range(owners), repeat=len(works))
    )
    assert max(found.loads) <= 4 / 3 * best


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=4), max_size=12))
def test_rounds_are_all_units_in_order_and_bounded(units: list[list[tuple[int, int]]]) -> None:
    rounds = rounds_of(units, least=60)
    assert [position for each in rounds for position in each] == list(range(len(units)))
    largest = max((size for unit in units for _, size in unit), default=0)
    for each in rounds:
        for owner in range(4):
            held = sum(size for position in each for own, size in units[position] if own == owner)
            assert len(each) == 1 or held <= max(60, MATRICES_UNDER_WAY * largest)
    for before, after in itertools.pairwise(rounds):
        joined = [row for position in (*before, after[0]) for row in units[position]]
        most = max(sum(size for own, size in joined if own == owner) for owner in range(4))
        assert most > max(60, MATRICES_UNDER_WAY * largest)  # no round is shorter than it has to be


def test_an_owner_of_nothing_and_no_matrices() -> None:
    assert deal([], 3).imbalance == 1.0
    assert deal([5.0], 3).loads.count(0.0) == 2
    assert rounds_of([]) == []
