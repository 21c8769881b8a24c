"""A fixed number of buffers serves any number of leases, first come, first served."""

import errno
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import BlockIO, inject, inject_latency
from mpispeed.store import pool as pools
from mpispeed.store.pool import Pool
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import STEP, SwappedTensor
from mpispeed.store.swap import SwapFolder

PARTS = 6
NUMEL = PARTS * STEP
TURNS = 20


class Bench:
    """One file, one stored tensor in it, and a pool."""

    def __init__(self, root, count):
        self.folder = SwapFolder(root, run_name(), 0)
        self.io = BlockIO()
        self.pool = Pool(4 * STEP, count, name="buffer_count")
        self.stored = SwappedTensor(NUMEL, torch.float32, self.folder.file("x", 4 * NUMEL), 0, self.io, self.pool)
        self.stored.put(torch.arange(NUMEL, dtype=torch.float32))

    def lend(self, part):
        return self.stored.lend(part * STEP, (part + 1) * STEP)

    def close(self):
        self.io.close()
        self.folder.remove()


@pytest.fixture
def bench(tmp_path):
    """Two buffers."""
    made = Bench(tmp_path, 2)
    yield made
    inject_latency(0)
    for op in ("read", "write"):
        inject(op, nth=0)
    made.close()


def expect(lease, part):
    assert lease.wait()[0].item() == part * STEP


def test_first_come_first_served(bench):
    leases = [bench.lend(part) for part in range(PARTS)]
    assert [lease.is_served for lease in leases] == [True, True, False, False, False, False]
    for part, lease in enumerate(leases):
        expect(lease, part)
        served = [later.is_served for later in leases[part + 1 :]]
        assert served == sorted(served, reverse=True)
        lease.give_back(changed=False)
    assert (bench.pool.made, bench.pool.owned_bytes) == (2, 8 * STEP)


def test_no_buffer_is_made_before_it_is_needed(bench):
    assert bench.pool.owned_bytes == 0
    for part in range(PARTS):
        lease = bench.lend(part)
        expect(lease, part)
        lease.give_back(changed=False)
    assert bench.pool.made == 1


def test_a_loan_longer_than_a_buffer_is_refused(bench):
    with pytest.raises(StoreError, match="raise buffer_count"):
        bench.stored.lend(0, 2 * STEP)


def test_a_withdrawn_loan_takes_no_buffer(bench):
    leases = [bench.lend(part) for part in range(4)]
    leases[2].give_back(changed=False)
    leases[0].give_back(changed=False)
    expect(leases[3], 3)
    with pytest.raises(StoreError, match="after it was given back"):
        leases[2].wait()


def test_a_loan_given_back_while_it_is_read(bench):
    inject_latency(0.02)
    for part in range(PARTS):
        bench.lend(part).give_back(changed=False)
    expect(bench.lend(5), 5)


def test_a_buffer_that_is_being_written_serves_nobody(bench):
    leases = [bench.lend(part) for part in range(2)]
    for part, lease in enumerate(leases):
        expect(lease, part)
    inject_latency(0.05)
    for lease in leases:
        lease.wait().fill_(7)
        lease.give_back(changed=True)
    again = bench.lend(0)
    assert not again.is_served
    assert again.wait().eq(7).all()


def test_a_loan_waits_until_another_thread_gives_back(bench):
    held = [bench.lend(part) for part in range(2)]
    for lease in held:
        lease.wait()
    late = bench.lend(4)
    threading.Timer(0.1, lambda: held[1].give_back(changed=False)).start()
    expect(late, 4)


def test_a_wait_that_can_never_end_says_so(bench, monkeypatch):
    monkeypatch.setattr(pools, "STUCK_SECONDS", 0.2)
    held = [bench.lend(part) for part in range(2)]
    with pytest.raises(StoreError, match=r"all 2 swap buffers are in use.*raise buffer_count"):
        bench.lend(3).wait()
    assert all(lease.is_served for lease in held)


def test_the_first_write_error_is_told_and_the_buffer_comes_back(bench):
    lease = bench.lend(0)
    lease.wait()
    inject("write", errno=errno.EIO)
    lease.give_back(changed=True)
    with pytest.raises(StoreError, match="could not be written"):
        bench.pool.settle()
    for part, lease in enumerate([bench.lend(part) for part in range(2)]):
        expect(lease, part)


def test_without_memory_the_loan_says_so_and_not_who_comes_by(bench, monkeypatch):
    def refuse(*_, **__):
        raise MemoryError

    expect(bench.lend(0), 0)
    monkeypatch.setattr(pools, "aligned", refuse)
    lease = bench.lend(1)
    bench.pool.reap()
    assert lease.is_ready()
    with pytest.raises(StoreError, match=r"no memory for a swap buffer of .* lower buffer_count"):
        lease.wait()
    lease.give_back(changed=False)


@given(order=st.permutations(range(PARTS)), changes=st.lists(st.booleans(), min_size=PARTS, max_size=PARTS))
def test_loans_come_back_in_any_order(tmp_path_factory, order, changes):
    bench = Bench(tmp_path_factory.mktemp("pool"), PARTS)
    try:
        expected = torch.arange(NUMEL, dtype=torch.float32)
        leases = {part: bench.lend(part) for part in range(PARTS)}
        for part in order:
            expect(leases[part], part)
            leases[part].wait().neg_()
            leases[part].give_back(changed=changes[part])
            if changes[part]:
                expected[part * STEP : (part + 1) * STEP].neg_()
        bench.pool.settle()
        assert torch.equal(bench.stored.get(), expected)
    finally:
        bench.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_buffers(tmp_path, count):
    bench = Bench(tmp_path, count)
    counts = [0] * PARTS

    def work(part):
        pick = random.Random(part)
        for _ in range(TURNS):
            lease = bench.lend(part)
            if pick.random() < 0.2:
                lease.give_back(changed=False)
                continue
            lease.wait().add_(1)
            lease.give_back(changed=True)
            counts[part] += 1
            bench.pool.settle()  # a part is not read again before it is written

    with ThreadPoolExecutor(PARTS) as executor:
        for done in [executor.submit(work, part) for part in range(PARTS)]:
            done.result(60)
    assert bench.pool.made <= count
    added = bench.stored.get() - torch.arange(NUMEL, dtype=torch.float32)
    assert added.view(PARTS, STEP).amin(1).tolist() == added.view(PARTS, STEP).amax(1).tolist() == counts
    bench.close()
