"""Small tensors through slots in shared memory: the bits of the ordered path, whatever the ranks' timing."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends import meetings, shared_memory, shared_slots
from mpispeed.mesh.collectives.host_collectives import ordered_all_reduce
from tests.helpers import verbs

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3, 4)]


@pytest.fixture(params=["compiled", "by messages"])
def made(comm, request, monkeypatch):
    """All ranks, with slots of their own, which meet in compiled code, or not as one of them has none."""
    if request.param == "by messages" and comm.rank == comm.size - 1:
        found = meetings.status.compiled
        monkeypatch.setattr(meetings.status, "compiled", lambda name: None if name == "meeting" else found(name))
    group = comm.duplicate()
    yield group
    group.close()


@pytest.fixture
def plain(comm):
    """All ranks, in rank order by messages."""
    group = comm.duplicate()
    group.group.reduction, group.group.limits.one_shot_bytes = "ordered", 0
    group.transport.fast = lambda: None
    yield group
    group.close()


@pytest.mark.parametrize("dtype", verbs.REDUCIBLE, ids=str)
def test_every_op(made, dtype):
    verbs.check_reductions(made, dtype)
    verbs.check_moves(made, dtype)


@pytest.mark.parametrize("dtype", verbs.REALS, ids=str)
def test_scales_and_the_tree(made, dtype):
    verbs.check_scales(made, dtype)
    verbs.check_ordered_bits(made, dtype, (0, 1, 7, 16385))
    assert made.transport.fast(is_small=True) is not None


def test_either_order_of_reduction_is_the_tree(made, plain):
    made.group.reduction = "mpi"
    x = verbs.noise(made.rank, 1000, torch.float32)
    wanted = x.clone()
    ordered_all_reduce(plain.group, wanted, "sum", 0.3)
    made.all_reduce(x, scale=0.3)
    assert verbs.same(x, wanted)


def test_many_calls_of_changing_sizes_with_late_ranks(made):
    """The first and last elements tell whose turn and whose slot was read."""
    size, rank, late = made.size, made.rank, random.Random(made.rank)
    sizes = random.Random(7)
    for call in range(300):
        count = sizes.choice((1, 5, 1000, 16384, 65536))
        if late.random() < 0.05:
            time.sleep(late.random() * 0.004)
        x = torch.full((count,), float(call + rank))
        made.all_reduce(x)
        wanted = float(sum(call + r for r in range(size)))
        assert (float(x[0]), float(x[-1])) == (wanted, wanted), call
        if call % 3 == 0:
            out = torch.zeros(size, 8, dtype=torch.int32)
            made.all_gather(out, torch.full((8,), call * size + rank, dtype=torch.int32))
            assert out[:, 0].tolist() == [call * size + r for r in range(size)]


def test_around_the_limit(made):
    """Just below, at and above what a slot holds, and where each rank sums many elements with two threads."""
    limit = shared_slots.SLOT_BYTES // 4
    for count in (limit - 1, limit, limit + 1):
        x = torch.full((count,), float(made.rank + 1))
        made.all_reduce(x)
        assert x.eq(made.size * (made.size + 1) / 2).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    x = verbs.noise(made.rank, limit, torch.bfloat16)
    parts = [verbs.noise(r, limit, torch.bfloat16).float() for r in range(made.size)]
    made.all_reduce(x)
    torch.set_num_threads(threads)
    assert verbs.same(x, verbs.tree(parts).to(torch.bfloat16))


def test_in_inference_mode_and_after_it(made):
    with torch.inference_mode():
        x = torch.ones(10)
        made.all_reduce(x)
    y = torch.ones(10)
    made.all_reduce(y)
    assert x.tolist() == y.tolist() == [float(made.size)] * 10


def test_started_ones_run_beside_blocking_ones(comm):
    for _ in range(20):
        x, y = torch.ones(100), torch.ones(100)
        work = comm.start_all_reduce(x)
        comm.all_reduce(y)
        work.wait(60)
        assert float(x[0]) == float(y[0]) == comm.size


def test_calls_that_differ_raise_on_all_ranks_and_do_no_harm(made):
    made.group.sequence = None  # not recorded: else a watchdog that another test has started ends the job
    is_last = made.rank == made.size - 1
    with pytest.raises(CommError, match=r"different verbs: .*all_reduce of 40 bytes.*all_reduce of 44 bytes"):
        made.all_reduce(torch.ones(11 if is_last else 10))
    with pytest.raises(CommError, match=r"\(max of int32\).*\(sum of int32\)|\(sum of int32\).*\(max of int32\)"):
        made.all_reduce(torch.ones(4, dtype=torch.int32), "max" if is_last else "sum")
    x = torch.ones(3)
    made.all_reduce(x)
    assert x.tolist() == [float(made.size)] * 3


def test_signals_are_served_while_waiting(comm):
    """An error in a handler ends the wait; the meeting is finished before the next."""
    made, seen = comm.duplicate(), []
    made.all_reduce(torch.ones(1))

    def stop(*_):
        seen.append(1)
        msg = "stop"
        raise TimeoutError(msg)

    kept = signal.signal(signal.SIGUSR2, stop)
    if made.rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(TimeoutError):
            made.all_reduce(torch.ones(5))
        assert seen
        for other in range(1, made.size):
            made.send(torch.ones(1), other)
    else:
        made.recv(torch.zeros(1), 0)  # rank 0 has been interrupted
        x = torch.ones(5)
        made.all_reduce(x)
        assert x.tolist() == [float(made.size)] * 5
    for _ in range(4):
        y = torch.ones(5)
        made.all_reduce(y)
        assert y.tolist() == [float(made.size)] * 5
    signal.signal(signal.SIGUSR2, kept)
    made.close()


def test_a_rank_that_waits_long_sleeps(comm):
    """Nobody burns a core: the wait of 0.4 s takes less than a tenth of it."""
    made = comm.duplicate()
    made.all_reduce(torch.ones(1))
    made.barrier()
    begin = time.thread_time()
    if made.rank == 0:
        time.sleep(0.4)
    made.all_reduce(torch.ones(1))
    assert time.thread_time() - begin < 0.04
    made.close()


def test_memory_that_is_refused_falls_back_on_all_ranks(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shared_memory, "_map", lambda path, total_bytes: None)
    made = comm.duplicate()
    x = torch.ones(100)
    made.all_reduce(x)
    assert made.transport.fast(is_small=True) is None
    assert x.eq(comm.size).all()
    made.close()


def test_ranks_of_two_nodes_keep_to_messages(comm):
    made = comm.duplicate()
    made.transport._node_ranks = frozenset({comm.rank})
    apart = made.duplicate()
    x = torch.ones(100)
    apart.all_reduce(x)
    assert apart.transport.fast(is_small=True) is None
    assert x.eq(comm.size).all()
    apart.close()
    made.close()
