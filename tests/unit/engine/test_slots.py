"""Slots: every micro-batch is computed once, and its leaf does not depend on the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError
from mpispeed.plan.slots import Slots


def all_leaves(slots):
    """Leaf by slot and part; each once."""
    places = [
        (rank, step, part)
        for rank in range(slots.ranks)
        for step in range(slots.per_rank)
        for part in range(slots.sequence)
    ]
    found = {(slots.slot(rank, step), part): slots.leaf(rank, step, part) for rank, step, part in places}
    assert len(found) == len(places)
    return found


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_every_slot_is_computed_once_and_keeps_its_leaf(per_rank, groups, together, sequence, in_turn):
    ranks = groups * together
    slots = Slots(per_rank * ranks, ranks, in_turn, together, sequence)
    found = all_leaves(slots)
    assert found == all_leaves(Slots(slots.count, together, True, together, sequence))
    assert sorted(found.values()) == list(range(slots.leaves))


@given(st.integers(1, 8), st.integers(1, 8))
def test_a_rank_has_a_run_of_leaves_or_a_micro_step_has(per_rank, ranks):
    runs, turns = Slots(per_rank * ranks, ranks, False), Slots(per_rank * ranks, ranks, True)
    for rank in range(ranks):
        first = rank * per_rank
        assert [runs.leaf(rank, step) for step in range(per_rank)] == list(range(first, first + per_rank))
    for step in range(per_rank):
        first = step * ranks
        assert [turns.leaf(rank, step) for rank in range(ranks)] == list(range(first, first + ranks))


def test_ranks_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="start 1, 2, 3, 4, 6, 12 of them,"):
        Slots(12, 5, True)
    with pytest.raises(ConfigError, match="no multiple"):
        Slots(12, 3, True, together=2)
