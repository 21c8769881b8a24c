"""The store over MPI: what all ranks do at once, waits between them, and gloo on top of it."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _store_based_barrier

from mpispeed.base.errors import CommError
from mpispeed.process_group.store import MpiStore, StoreTimeout

pytestmark = pytest.mark.mpi

ROUNDS = 50
LIMIT = timedelta(seconds=20)


@pytest.fixture
def store(comm, world):
    made = MpiStore(comm, LIMIT, has_threads=world.has_threads)
    yield made
    made.close()


def test_mixed_operations_of_all_ranks_count_once_each(store, comm):
    for turn in range(ROUNDS):
        store.set(f"{comm.rank}/{turn}", bytes([turn]) * turn)
        store.add("sum", comm.rank + 1)
        store.append("log", "x")
        assert store.get(f"{(comm.rank + 1) % comm.size}/{turn}") == bytes([turn]) * turn
    assert store.add("ended", 1) <= comm.size
    if store.add("ended", 0) == comm.size:
        store.set("all", "")
    store.wait(["all"])
    assert store.get("sum") == str(ROUNDS * comm.size * (comm.size + 1) // 2).encode()
    assert store.get("log") == b"x" * ROUNDS * comm.size
    assert store.num_keys() == comm.size * ROUNDS + 4
    assert store.multi_get(["ended", "all"]) == [str(comm.size).encode(), b""]


@pytest.mark.ranks(2, 3)
def test_a_rank_waits_for_a_key_that_another_one_sets_later(store, comm):
    last = comm.size - 1
    if comm.rank == last:
        time.sleep(0.1)
        store.set("key", "late")
        assert store.get("answer") == b"0"
    else:
        assert store.get("key") == b"late"
        if comm.rank == 0:
            store.set("answer", "0")


@pytest.mark.ranks(2)
def test_a_thread_that_waits_does_not_keep_another_from_setting(store, comm):
    found = []
    waiting = threading.Thread(target=lambda: found.append(store.get(f"own {comm.rank}")))
    waiting.start()
    time.sleep(0.05)
    store.set(f"own {comm.rank}", "x")
    waiting.join()
    assert found == [b"x"]


@pytest.mark.ranks(2, 4)
def test_a_wait_in_vain_names_the_key_and_all_ranks_that_wait(store, comm):
    if comm.rank in (0, comm.size - 1):
        with pytest.raises(StoreTimeout, match=rf"rank {comm.rank} waited 0.3 s for 'a key'"):
            store.wait(["a key"], timedelta(seconds=0.3))
    if comm.rank == 0:
        store.set("go on", "")
    store.wait(["go on"])


@pytest.mark.ranks(1, 2)
def test_the_largest_value_arrives(store, comm):
    value = bytes(range(256)) * (16 << 12)
    if comm.rank == comm.size - 1:
        store.set("large", value)
    assert store.get("large") == value


def test_gloo_and_the_barrier_of_torch_start_from_it(store, comm):
    _store_based_barrier(comm.rank, store, "group", comm.size, LIMIT)
    # Not as the default group, which is that of the other tests of this process.
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), comm.rank, comm.size, LIMIT)
    x = torch.full((3,), float(comm.rank))
    gloo.allreduce([x]).wait()
    assert x.tolist() == [comm.size * (comm.size - 1) / 2] * 3
    gloo.barrier().wait()
    if comm.rank == 0:
        torch._C._distributed_c10d._test_python_store(store)


@pytest.mark.ranks(2, 3)
def test_a_store_ends_though_a_rank_does_not_close_it(comm, world, caplog):
    store = MpiStore(comm, LIMIT, name="left alone")
    thread = store._server._thread if comm.rank == 0 else None
    if comm.rank < comm.size - 1:
        store.close(0.2)
    if comm.rank == 0:
        assert not thread.is_alive()
        assert f"rank {comm.size - 1} did not close" in caplog.text
    world.comm.barrier()
    if comm.rank == comm.size - 1:
        store.close(0.2)


@pytest.mark.ranks(2)
def test_nothing_is_counted_and_the_thread_ends(comm, world):
    before = world.comm_trace.summary()
    store = MpiStore(comm, LIMIT)
    store.add("a", 1)
    store.close()
    store.close()
    assert world.comm_trace.summary() == before
    with pytest.raises(CommError, match="the store is closed"):
        store.get("a")
    assert not any(thread.name == "mpispeed-store" for thread in threading.enumerate())
