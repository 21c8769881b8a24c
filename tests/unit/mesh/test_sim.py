"""Simulated ranks fail as real ones should: at once, for everyone, saying who and where."""

import threading

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import sim


def test_results_are_in_rank_order():
    assert sim.run(3, lambda world: world.rank * 10) == [0, 10, 20]


def test_an_error_of_one_rank_is_raised():
    others = []

    def fn(world):
        if world.rank == 1:
            msg = "planted"
            raise ValueError(msg)
        try:
            world.comm.barrier()
        except CommError as error:
            others.append(str(error))
            raise

    with pytest.raises(ValueError, match="planted"):
        sim.run(3, fn)
    assert len(others) == 2
    assert all("rank 1 failed with ValueError: planted" in text for text in others)


def test_a_rank_that_ends_early_is_named():
    def fn(world):
        if world.rank != 2:
            world.comm.all_reduce(torch.ones(2), "max")

    with pytest.raises(CommError, match=r"all_reduce of ranks \[0, 1, 2\]: rank 2 ended"):
        sim.run(3, fn)


def test_a_late_rank_is_named():
    given_up = threading.Event()

    def fn(world):
        if world.rank == 0:
            given_up.wait(60)
        try:
            world.comm.barrier()
        finally:
            given_up.set()

    with pytest.raises(CommError, match=r"barrier of ranks \[0, 1\]: rank 0 did not come within 0\.1 s"):
        sim.run(2, fn, timeout_seconds=0.1)


def test_different_verbs_are_named():
    def fn(world):
        if world.rank == 0:
            world.comm.barrier()
        else:
            world.comm.share(1)

    with pytest.raises(CommError, match="different verbs"):
        sim.run(2, fn)


def test_different_sizes_are_named():
    with pytest.raises(CommError, match="ranks bring different tensors"):
        sim.run(2, lambda world: world.comm.all_reduce(torch.ones(world.rank + 1), "max"))


def test_missing_message():
    def fn(world):
        if world.rank == 0:
            world.comm.recv(torch.ones(1), 1, tag=4)

    with pytest.raises(CommError, match=r"recv.tag=4. on rank 0: rank 1 ended"):
        sim.run(2, fn)


def test_message_of_another_size():
    def fn(world):
        if world.rank == 0:
            world.comm.send(torch.ones(3), 1)
        else:
            world.comm.recv(torch.ones(2), 0)

    with pytest.raises(CommError, match="sent 12 bytes where rank 1 expects 8"):
        sim.run(2, fn)


def test_a_started_verb_nobody_joins_runs_out_of_time():
    given_up = threading.Event()

    def fn(world):
        if world.rank == 0:
            try:
                world.comm.start_all_reduce(torch.ones(1)).wait()
            finally:
                given_up.set()
        else:
            given_up.wait(60)

    with pytest.raises(CommError, match=r"started all_reduce .* not all ranks came within 0\.1 s"):
        sim.run(2, fn, timeout_seconds=0.1)


def test_wait_has_a_limit_of_its_own():
    def fn(world):
        if world.rank == 0:
            work = world.comm.start_recv(torch.ones(1), 1)
            with pytest.raises(CommError, match=r"recv was not done after 0\.05 s"):
                work.wait(0.05)
            assert not work.is_done()
            world.comm.barrier()
            work.wait(20)
        else:
            world.comm.barrier()
            world.comm.start_send(torch.ones(1), 0).wait(20)

    sim.run(2, fn)
