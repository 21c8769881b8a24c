"""Requests are cut into batches by length: all of them, once, within limits."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.generation import batches as module
from mpispeed.generation.batches import cut
from mpispeed.generation.requests import PromptError

REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=80)


@settings(deadline=None, max_examples=150)
@given(
    requests=REQUESTS,
    batch_size=st.integers(1, 9),
    tokens=st.one_of(st.none(), st.integers(2, 300)),
    positions=st.one_of(st.none(), st.integers(2, 90)),
    too_long=st.sampled_from(["skip", "truncate"]),
)
def test_every_request_is_once_there_and_limits_are_kept(requests, batch_size, tokens, positions, too_long):
    lengths, limits = (np.array([each[which] for each in requests], np.int64) for which in (0, 1))
    found = cut(
        lengths, limits, batch_size=batch_size, max_batch_tokens=tokens, max_positions=positions, too_long=too_long
    )
    assert sorted([*found.order.tolist(), *found.left_out.tolist()]) == list(range(len(requests)))
    assert found.starts[0] == 0
    assert found.starts[-1] == len(found.order)
    assert (np.diff(found.starts) >= 1).all()
    most = min(each or 10**9 for each in (tokens, positions))
    for batch in range(len(found)):
        longest, new = found.positions(batch)
        assert len(found[batch]) <= batch_size
        assert new >= 1
        assert longest + new <= most
        assert (longest + new) * len(found[batch]) <= (tokens or 10**9)
        assert (found.batch_of()[found[batch]] == batch).all()
    assert (found.batch_of()[found.left_out] == -1).all()
    if too_long == "truncate":
        assert not found.left_out.size
        kept = found.lengths
        is_cut = kept < lengths
        assert (kept <= lengths).all()
        assert ((kept >= 1) | (lengths == 0)).all()
        assert (lengths[is_cut] >= most).all()
    else:
        assert found.left_out.tolist() == np.nonzero(lengths >= most)[0].tolist()
        assert (found.lengths == lengths).all()


@settings(deadline=None, max_examples=80)
@given(requests=REQUESTS, batch_size=st.integers(1, 9))
def test_lengths_of_a_batch_are_neighbours_and_work_gets_shorter(requests, batch_size):
    lengths, limits = (np.array([each[which] for each in requests], np.int64) for which in (0, 1))
    found = cut(lengths, limits, batch_size=batch_size)
    widths = [sum(found.positions(batch)) for batch in range(len(found))]
    assert widths == sorted(widths, reverse=True)
    spans = sorted((lengths[found[batch]].min(), lengths[found[batch]].max()) for batch in range(len(found)))
    assert all(lower[1] <= upper[0] for lower, upper in itertools.pairwise(spans))
    assert sum(len(found[batch]) < batch_size for batch in range(len(found))) <= 1


def test_a_batch_is_filled_as_far_as_the_limit_allows():
    found = cut(np.array([3, 9, 5, 9, 1]), np.array([2, 1, 1, 3, 1]), batch_size=4, max_batch_tokens=24)
    assert [found[batch].tolist() for batch in range(len(found))] == [[3, 1], [2, 0, 4]]
    assert found.positions(0) == (9, 3)
    assert found.positions(1) == (5, 2)


def test_equal_lengths_stay_in_their_order():
    found = cut(np.full(7, 4), 3, batch_size=3)
    assert found.order.tolist() == list(range(7))
    assert [len(found[batch]) for batch in range(3)] == [3, 3, 1]


def test_the_digest_depends_on_all_that_matters():
    lengths = np.array([5, 2, 9, 2])
    base = cut(lengths, 4, batch_size=2)
    assert cut(lengths.astype(np.int32), np.full(4, 4), batch_size=2).digest == base.digest
    others = [
        cut(lengths, 4, batch_size=3),
        cut(lengths, 5, batch_size=2),
        cut(lengths + 1, 4, batch_size=2),
        cut(lengths, 4, batch_size=2, max_positions=9, too_long="skip"),
        cut(lengths, 4, batch_size=2, max_positions=9, too_long="truncate"),
    ]
    assert len({base.digest, *(each.digest for each in others)}) == 6


def test_prompts_that_are_too_long_are_named():
    with pytest.raises(PromptError, match=r"2 of 4 prompts leave no room .* 9 tokens \(number 2 with 9, number 3"):
        cut(np.array([5, 2, 9, 12]), 4, batch_size=2, max_positions=9)
    with pytest.raises(PromptError, match="and 3 more"):
        cut(np.full(8, 50), 4, batch_size=2, max_batch_tokens=9)


def test_truncated_prompts_leave_room_for_the_answer_but_keep_half():
    found = cut(np.array([100, 100, 7]), np.array([3, 90, 5]), batch_size=1, max_positions=10, too_long="truncate")
    assert found.lengths.tolist() == [7, 5, 7]
    assert found.limits.tolist() == [3, 5, 3]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected a whole number from 1"),
        ({"batch_size": 2, "max_batch_tokens": 1}, "max_batch_tokens is 1; expected a whole number from 2"),
        ({"batch_size": 2, "too_long": "cut"}, "too_long is 'cut'; expected error, skip, truncate"),
        ({"batch_size": 2, "limits": 0}, "answers may have 0 to 0"),
    ],
)
def test_limits_that_cannot_hold_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        cut(np.array([1, 2]), **{"limits": 3, **options})


def test_a_million_requests_take_seconds_at_most():
    lengths = np.random.default_rng(5).integers(1, 2000, 1_000_000)
    found = cut(lengths, 100, batch_size=64, max_batch_tokens=64 * 1024)
    assert sum(np.diff(found.starts)) == 1_000_000
    with pytest.raises(IndexError, match="there is no number"):
        found[len(found)]
    assert module.TOO_LONG == ("error", "skip", "truncate")
