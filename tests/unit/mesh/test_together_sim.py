"""A step of every rank by itself that fails on all ranks if it fails on one, on simulated ranks."""

import pytest

from mpispeed.base.errors import CheckpointError, ConfigError, StoreError
from mpispeed.mesh import sim, solo_comm
from mpispeed.mesh.comm import Failures, agree_by_texts, together


def failing_on(ranks, failure, error=StoreError, **options):
    """What each of three ranks raises if `failure` is raised on some: (type, text, type of the cause)."""

    def fn(world):
        try:
            with world.comm.together(error, **options):
                if world.rank in ranks:
                    raise failure  # noqa: TRY301 - what the block does with it is asked
        except Exception as raised:
            return type(raised), str(raised), raised.is_collective, type(raised.__cause__)
        return None

    return sim.run(3, fn)


def test_nothing_is_raised_where_all_succeed():
    assert failing_on((), StoreError("full")) == [None] * 3


def test_all_ranks_raise_the_failure_of_one_and_name_it():
    told = (StoreError, "rank 1 of 3: full", True)
    assert failing_on((1,), StoreError("full")) == [(*told, type(None)), (*told, StoreError), (*told, type(None))]


def test_the_first_of_several_failures_is_told():
    assert {row[:2] for row in failing_on((1, 2), StoreError("full"))} == {(StoreError, "ranks 1, 2 of 3: full")}


@pytest.mark.parametrize(
    ("failure", "options", "text"),
    [
        (OSError("no room"), {}, "OSError: no room"),
        (OSError("no room"), {"plain": OSError}, "no room"),
        (ConfigError("odd"), {"plain": OSError}, "ConfigError: odd"),
        (KeyError(), {"plain": Exception}, "KeyError"),
        (OSError("no room"), {"doing": "writing", "plain": OSError}, "writing: no room"),
        (ZeroDivisionError("by 0"), {"doing": "writing"}, "writing: ZeroDivisionError: by 0"),
    ],
)
def test_what_is_not_plain_is_told_with_its_type(failure, options, text):
    rows = failing_on((2,), failure, CheckpointError, **options)
    assert {row[:2] for row in rows} == {(CheckpointError, f"rank 2 of 3: {text}")}


def test_a_rank_alone_is_not_named():
    with pytest.raises(StoreError, match=r"^full$"), solo_comm().together(StoreError):
        raise StoreError("full")


def test_what_is_no_failure_passes():
    with pytest.raises(KeyboardInterrupt), solo_comm().together(StoreError):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), None),
        ((1,), "KeyError: 'x' (on rank 1)"),
        ((0, 2), "KeyError: 'x' (on rank 0)"),
        ((0, 1, 2), "KeyError: 'x'"),
    ],
)
def test_a_mistake_that_all_ranks_make_is_told_without_a_rank(ranks, text):
    def fn(world):
        try:
            with together(agree_by_texts(world.comm.gather_objects), ConfigError):
                if world.rank in ranks:
                    raise KeyError("x")
        except ConfigError as raised:
            return str(raised)
        return None

    assert sim.run(3, fn) == [text] * 3


def test_a_failure_between_exchanges_is_raised_after_them():
    def fn(world):
        failures, sums = Failures(), []
        for number in range(3):
            with failures.kept():
                if world.rank == 1 and number > 0:
                    raise KeyError(number)
            sums.append(sum(world.comm.gather_objects(number)))
        assert (failures.text() == "KeyError: 1") == (world.rank == 1)
        with pytest.raises(StoreError, match=r"^rank 1 of 3: KeyError: 1$"), world.comm.together(StoreError):
            failures.raise_first()
        with world.comm.together(StoreError):
            failures.raise_first()  # it was told
        return sums

    assert sim.run(3, fn) == [[0, 3, 6]] * 3
