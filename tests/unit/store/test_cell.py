"""A stored tensor gives back what it was given, from memory or from a file, and says why when it cannot."""

import errno
import os

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import inject
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import STEP, WIDENED, MemoryTensor, settle, widen
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import PARAM, SwapPlan, Tiers

NUMEL = 3 * STEP + 5


@pytest.fixture
def tiers(tmp_path):
    """Two swapped stored tensors, with room for two buffers of each kind."""
    tensors = {("exp_avg", 0): (NUMEL, torch.float32), (PARAM, 0): (NUMEL, torch.bfloat16)}
    plan = SwapPlan(tensors, states_bytes=2 * 4 * STEP, param_bytes=2 * NUMEL, param_buffers=2, reads_ahead=True)
    folder = SwapFolder(tmp_path, run_name(), 0)
    made = Tiers(plan, dict.fromkeys(("exp_avg", PARAM), folder))
    yield made
    for op in ("read", "write"):
        inject(op, nth=0)
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def stored(tiers):
    """A swapped stored tensor of zeros."""
    return tiers.zeros("exp_avg", 0, NUMEL, torch.float32)


def numbers():
    return torch.arange(NUMEL, dtype=torch.float32)


def test_memory_is_its_tensor():
    values = numbers()
    stored = MemoryTensor(values)
    assert stored.get() is values
    assert (stored.memory_bytes, stored.file_bytes, stored.is_swapped) == (4 * NUMEL, 0, False)
    lease = stored.lend(7, 20)
    assert lease.is_ready()
    lease.wait().zero_()
    lease.give_back(changed=True)
    assert values[7:20].count_nonzero() == 0
    stored.put(values)
    stored.put(torch.ones(NUMEL))
    assert values.eq(1).all()
    stored.clear()
    assert values.count_nonzero() == 0


@pytest.mark.parametrize("numel", [1, 2, 5, 1000, 3 * WIDENED + 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_values_are_widened_where_they_are(numel, dtype):
    values = torch.full((numel,), 7.0)
    narrow = MemoryTensor(values).narrowed(dtype)
    wanted = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    narrow.put(wanted)
    assert (narrow.numel, narrow.dtype, narrow.memory_bytes) == (numel, dtype, numel * dtype.itemsize)
    widen(values, dtype)
    assert torch.equal(values, wanted.float())


def test_a_file_holds_the_one_or_the_other_dtype(stored):
    narrow = stored.narrowed(torch.bfloat16)
    for _ in range(2):
        stored.put(numbers())
        narrow.put(numbers().bfloat16())
        assert torch.equal(narrow.get(), numbers().bfloat16())
        lease = narrow.lend(STEP, 2 * STEP)
        assert torch.equal(lease.wait(), numbers()[STEP : 2 * STEP].bfloat16())
        lease.give_back(changed=False)
    stored.put(numbers())
    assert torch.equal(stored.get(), numbers())


def test_what_was_never_written_is_zero_and_is_not_read(tiers, stored):
    before = tiers.io.counters
    assert stored.get().count_nonzero() == 0
    lease = stored.lend(STEP, 2 * STEP)
    assert lease.wait().count_nonzero() == 0
    lease.give_back(changed=False)
    assert tiers.io.counters == before


@pytest.mark.parametrize("kind", ["exp_avg", PARAM])
def test_put_and_get(tiers, kind):
    dtype = tiers.plan.tensors[kind, 0][1]
    stored = tiers.keep(kind, 0, numbers().to(dtype))
    assert torch.equal(stored.get(), numbers().to(dtype))
    stored.put(-stored.get())
    assert torch.equal(stored.get(), -numbers().to(dtype))
    assert (stored.memory_bytes, stored.file_bytes) == (0, NUMEL * dtype.itemsize)
    stored.clear()
    assert stored.get().count_nonzero() == 0
    assert tiers.problem == ""


def test_ranges_come_and_go(tiers, stored):
    stored.put(numbers())
    expected = numbers()
    for start in range(0, NUMEL, STEP):
        stop = min(start + STEP, NUMEL)
        lease = stored.lend(start, stop)
        assert torch.equal(lease.wait(), expected[start:stop])
        lease.wait().mul_(2)
        expected[start:stop] *= 2
        lease.give_back(changed=True)
    settle([stored])
    assert torch.equal(stored.get(), expected)
    kept = stored.lend(0, STEP)
    kept.wait().zero_()
    kept.give_back(changed=False)
    assert torch.equal(stored.get(), expected)


def test_a_range_that_is_not_read_is_written_whole(tiers, stored):
    stored.put(numbers())
    lease = stored.lend(STEP, 2 * STEP, reads=False)
    lease.wait().fill_(-1)
    lease.give_back(changed=True)
    tiers.settle()
    expected = numbers()
    expected[STEP : 2 * STEP] = -1
    assert torch.equal(stored.get(), expected)


@pytest.mark.parametrize(("start", "stop"), [(1, STEP), (0, NUMEL + 1), (STEP, 0)])
def test_odd_ranges_are_refused(stored, start, stop):
    with pytest.raises(StoreError, match="cannot be lent"):
        stored.lend(start, stop)


def test_gaps_are_refused(stored):
    lease = stored.lend(STEP, 2 * STEP)
    lease.wait()
    with pytest.raises(StoreError, match="are given back before"):
        lease.give_back(changed=True)
    again = [stored.lend(0, STEP) for _ in range(2)]  # the buffer came back all the same
    for lease in again:
        lease.wait()


def test_values_that_do_not_fit_are_refused(stored):
    for values in (torch.zeros(NUMEL - 1), torch.zeros(NUMEL, dtype=torch.float64)):
        with pytest.raises(StoreError, match="cannot be set"):
            stored.put(values)


def test_a_loan_that_is_over_holds_nothing(stored):
    lease = stored.lend(0, STEP)
    lease.wait()
    lease.give_back(changed=False)
    lease.give_back(changed=False)
    with pytest.raises(StoreError, match="after it was given back"):
        lease.wait()


def test_failures_name_the_file_the_reason_and_what_to_do(tiers, stored):
    stored.put(numbers())
    for verb, op, act in (
        ("written", "write", lambda: stored.put(numbers())),
        ("read", "read", stored.get),
        ("read", "read", lambda: stored.lend(0, STEP).wait()),
    ):
        inject(op, errno=errno.EIO)
        with pytest.raises(StoreError, match=f"could not be {verb}: .*{os.strerror(errno.EIO)}.*exp_avg.swap.*resume"):
            act()


def test_a_write_that_fails_is_told_by_settle_once(tiers, stored):
    stored.put(numbers())
    lease = stored.lend(0, STEP)
    lease.wait()
    inject("write", errno=errno.ENOSPC)
    lease.give_back(changed=True)
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
        tiers.settle()
    tiers.settle()


def test_keep_remembers_its_first_failure(tiers):
    inject("write", errno=errno.ENOSPC)
    tiers.keep("exp_avg", 0, numbers())
    assert os.strerror(errno.ENOSPC) in tiers.problem


@pytest.mark.parametrize("act", ["get", "put", "lend", "give_back"])
def test_a_file_that_somebody_has_cut_is_never_written_on(tiers, stored, act, tmp_path):
    stored.put(numbers())
    lease = stored.lend(0, STEP)
    lease.wait()
    (path,) = tmp_path.rglob("exp_avg.swap")
    os.truncate(path, 4096)
    with pytest.raises(StoreError, match="somebody has cut the file to 4096 bytes"):
        if act == "get":
            stored.get()
        elif act == "put":
            stored.put(numbers())
        elif act == "lend":
            stored.lend(0, STEP).wait()
        else:
            lease.give_back(changed=True)
    assert path.stat().st_size == 4096


def test_closed_files_are_an_error(tiers, stored):
    stored.put(numbers())
    tiers.close()
    with pytest.raises(Exception, match="closed"):
        stored.get()
