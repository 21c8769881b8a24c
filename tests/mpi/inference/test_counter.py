"""The shared counter of batch generation: each number once, rank 0 busy, news of a stop."""

import sys
import time

import pytest

from mpispeed.generation.counter import NONE, Counter, Report, Stop
from mpispeed.mesh import start

pytestmark = pytest.mark.mpi(min_size=2)


def ends(counter, comm):
    """Leave with the others."""
    counter.leave(Report())
    counter.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_each_number_is_handed_out_once(comm, is_threaded):
    told = []
    counter = Counter(start(), 40, lambda rank, report: told.append((rank, report.number)), is_threaded=is_threaded)
    own, report = [], Report()
    while True:
        counter.ask(report)
        number = counter.take()
        if number == NONE:
            break
        own.append(number)
        report = Report(number, prompts=2, tokens=7, microseconds=5)
        time.sleep(0.002)
    ends(counter, comm)
    assert own == sorted(own)
    every = comm.gather_objects(own)
    assert sorted(sum(every, [])) == list(range(40))
    assert all(every), "every rank has had some"
    if comm.rank == 0:
        assert sorted(told) == sorted((rank, number) for rank, numbers in enumerate(every) for number in numbers)


@pytest.mark.ranks(2, 3)
def test_rank_0_is_busy_and_nobody_waits(comm):
    before = sys.getswitchinterval()
    counter = Counter(start(), 1000, lambda *_: None)
    waits = []
    if comm.rank == 0:
        end = time.perf_counter() + 0.6
        while time.perf_counter() < end:
            pass
    else:
        for _ in range(20):
            counter.ask(Report())
            assert counter.take() != NONE
            waits.append(counter.waited_seconds)
    ends(counter, comm)
    # Ranks share cores here, so one of many may be late by itself.
    assert comm.rank == 0 or sorted(waits)[len(waits) // 2] < 0.1
    assert sys.getswitchinterval() == before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_threaded", [True, False])
def test_the_stop_of_one_rank_reaches_all(comm, is_threaded):
    counter = Counter(start(), 10**6, lambda *_: None, is_threaded=is_threaded)
    asked = Stop(3, 1500, 10, comm.size - 1)
    taken = 0
    while True:
        if comm.rank == comm.size - 1 and taken == 5:
            counter.request_stop(asked)
            counter.request_stop(Stop(4))  # later ones change nothing
        counter.ask(Report())
        if counter.take() == NONE:
            break
        taken += 1
        time.sleep(0.001)
    stop = counter.heed()
    ends(counter, comm)
    assert comm.gather_objects(counter.heed()) == [asked] * comm.size
    assert stop in (asked, Stop())  # a rank may have had NONE before the news


@pytest.mark.ranks(2, 3)
def test_nothing_to_hand_out(comm):
    counter = Counter(start(), 0, lambda *_: None)
    counter.ask(Report())
    assert counter.take() == NONE
    assert not counter.heed().asked
    ends(counter, comm)
