"""Votes on operations."""

from mpispeed.watchdog.compare import Comparer, Mismatch, Vote


def vote(rank, sig=1, text="all_reduce of 8 float32"):
    return Vote(rank, sig, text, f"train.py:{rank}")


def test_equal_votes_are_forgotten_once_all_have_come():
    comparer = Comparer()
    for rank in range(3):
        assert comparer.add(("g", 1), rank, vote(rank), lambda: range(3)) is None
    assert not comparer._pending


def test_the_first_vote_that_differs_is_told_with_the_one_it_differs_from():
    comparer = Comparer()
    assert comparer.add(("g", 1), 0, vote(0), lambda: range(3)) is None
    assert comparer.add(("g", 1), 2, vote(2, sig=7), lambda: range(3)) == (vote(0), vote(2, sig=7))


def test_numbers_and_groups_are_compared_apart():
    comparer = Comparer()
    assert comparer.add(("g", 1), 0, vote(0, sig=1), lambda: range(2)) is None
    assert comparer.add(("g", 2), 1, vote(1, sig=2), lambda: range(2)) is None
    assert comparer.add(("h", 1), 1, vote(1, sig=2), lambda: range(2)) is None


def test_a_voter_alone_is_not_waited_for():
    comparer = Comparer()
    assert comparer.add(("g", 1), 0, vote(0), lambda: [0]) is None
    assert not comparer._pending


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("mpispeed.watchdog.compare.MOST_PENDING", 10)
    comparer = Comparer()
    for seq in range(50):
        comparer.add(("g", seq), 0, vote(0), lambda: range(2))
    assert len(comparer._pending) == 10


def test_text_names_group_number_ranks_and_places():
    text = Mismatch("data", 6, (vote(0), vote(1, 2, "barrier"))).text()
    assert text == (
        "operation 6 over data is not the same on all ranks: rank 0 came with all_reduce of 8 float32 at train.py:0; "
        "rank 1 came with barrier at train.py:1"
    )
