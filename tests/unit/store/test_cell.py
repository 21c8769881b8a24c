"""A cell gives back what it was given, from memory or from a file, and says why when it cannot."""

import errno
import os

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import inject
from mpispeed.store.cell import STEP, MemoryCell, settle
from mpispeed.store.swap import SwapFolder, run_name
from mpispeed.store.tiers import PARAM, SwapPlan, Tiers

NUMEL = 3 * STEP + 5


@pytest.fixture
def tiers(tmp_path):
    """Two swapped cells, with room for two buffers of each kind."""
    cells = {("exp_avg", 0): (NUMEL, torch.float32), (PARAM, 0): (NUMEL, torch.bfloat16)}
    plan = SwapPlan(cells, states_bytes=2 * 4 * STEP, param_bytes=2 * NUMEL, param_buffers=2, reads_ahead=True)
    folder = SwapFolder(tmp_path, run_name(), 0)
    made = Tiers(plan, dict.fromkeys(("exp_avg", PARAM), folder))
    yield made
    for op in ("read", "write"):
        inject(op, nth=0)
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cell(tiers):
    """A swapped cell of zeros."""
    return tiers.zeros("exp_avg", 0, NUMEL, torch.float32)


def numbers():
    return torch.arange(NUMEL, dtype=torch.float32)


def test_memory_is_its_tensor():
    values = numbers()
    cell = MemoryCell(values)
    assert cell.get() is values
    assert (cell.memory_bytes, cell.file_bytes, cell.is_swapped) == (4 * NUMEL, 0, False)
    loan = cell.lend(7, 20)
    assert loan.is_ready()
    loan.wait().zero_()
    loan.give_back(changed=True)
    assert values[7:20].count_nonzero() == 0
    cell.put(values)
    cell.put(torch.ones(NUMEL))
    assert values.eq(1).all()
    cell.clear()
    assert values.count_nonzero() == 0


def test_what_was_never_written_is_zero_and_is_not_read(tiers, cell):
    before = tiers.io.counters
    assert cell.get().count_nonzero() == 0
    loan = cell.lend(STEP, 2 * STEP)
    assert loan.wait().count_nonzero() == 0
    loan.give_back(changed=False)
    assert tiers.io.counters == before


@pytest.mark.parametrize("kind", ["exp_avg", PARAM])
def test_put_and_get(tiers, kind):
    dtype = tiers.plan.cells[kind, 0][1]
    cell = tiers.keep(kind, 0, numbers().to(dtype))
    assert torch.equal(cell.get(), numbers().to(dtype))
    cell.put(-cell.get())
    assert torch.equal(cell.get(), -numbers().to(dtype))
    assert (cell.memory_bytes, cell.file_bytes) == (0, NUMEL * dtype.itemsize)
    cell.clear()
    assert cell.get().count_nonzero() == 0
    assert tiers.problem == ""


def test_ranges_come_and_go(tiers, cell):
    cell.put(numbers())
    expected = numbers()
    for start in range(0, NUMEL, STEP):
        stop = min(start + STEP, NUMEL)
        loan = cell.lend(start, stop)
        assert torch.equal(loan.wait(), expected[start:stop])
        loan.wait().mul_(2)
        expected[start:stop] *= 2
        loan.give_back(changed=True)
    settle([cell])
    assert torch.equal(cell.get(), expected)
    kept = cell.lend(0, STEP)
    kept.wait().zero_()
    kept.give_back(changed=False)
    assert torch.equal(cell.get(), expected)


def test_a_range_that_is_not_read_is_written_whole(tiers, cell):
    cell.put(numbers())
    loan = cell.lend(STEP, 2 * STEP, reads=False)
    loan.wait().fill_(-1)
    loan.give_back(changed=True)
    tiers.settle()
    expected = numbers()
    expected[STEP : 2 * STEP] = -1
    assert torch.equal(cell.get(), expected)


@pytest.mark.parametrize(("start", "stop"), [(1, STEP), (0, NUMEL + 1), (STEP, 0)])
def test_odd_ranges_are_refused(cell, start, stop):
    with pytest.raises(StoreError, match="cannot be lent"):
        cell.lend(start, stop)


def test_gaps_are_refused(cell):
    loan = cell.lend(STEP, 2 * STEP)
    loan.wait()
    with pytest.raises(StoreError, match="are given back before"):
        loan.give_back(changed=True)
    again = [cell.lend(0, STEP) for _ in range(2)]  # the buffer came back all the same
    for loan in again:
        loan.wait()


def test_values_that_do_not_fit_are_refused(cell):
    for values in (torch.zeros(NUMEL - 1), torch.zeros(NUMEL, dtype=torch.float64)):
        with pytest.raises(StoreError, match="cannot be set"):
            cell.put(values)


def test_a_loan_that_is_over_holds_nothing(cell):
    loan = cell.lend(0, STEP)
    loan.wait()
    loan.give_back(changed=False)
    loan.give_back(changed=False)
    with pytest.raises(StoreError, match="after it was given back"):
        loan.wait()


def test_failures_name_the_file_the_reason_and_what_to_do(tiers, cell):
    cell.put(numbers())
    for verb, op, act in (
        ("written", "write", lambda: cell.put(numbers())),
        ("read", "read", cell.get),
        ("read", "read", lambda: cell.lend(0, STEP).wait()),
    ):
        inject(op, errno=errno.EIO)
        with pytest.raises(StoreError, match=f"could not be {verb}: .*{os.strerror(errno.EIO)}.*exp_avg.swap.*resume"):
            act()


def test_a_write_that_fails_is_told_by_settle_once(tiers, cell):
    cell.put(numbers())
    loan = cell.lend(0, STEP)
    loan.wait()
    inject("write", errno=errno.ENOSPC)
    loan.give_back(changed=True)
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
        tiers.settle()
    tiers.settle()


def test_keep_remembers_its_first_failure(tiers):
    inject("write", errno=errno.ENOSPC)
    tiers.keep("exp_avg", 0, numbers())
    assert os.strerror(errno.ENOSPC) in tiers.problem


@pytest.mark.parametrize("act", ["get", "put", "lend", "give_back"])
def test_a_file_that_somebody_has_cut_is_never_written_on(tiers, cell, act, tmp_path):
    cell.put(numbers())
    loan = cell.lend(0, STEP)
    loan.wait()
    (path,) = tmp_path.rglob("exp_avg.swap")
    os.truncate(path, 4096)
    with pytest.raises(StoreError, match="somebody has cut the file to 4096 bytes"):
        if act == "get":
            cell.get()
        elif act == "put":
            cell.put(numbers())
        elif act == "lend":
            cell.lend(0, STEP).wait()
        else:
            loan.give_back(changed=True)
    assert path.stat().st_size == 4096


def test_closed_files_are_an_error(tiers, cell):
    cell.put(numbers())
    tiers.close()
    with pytest.raises(Exception, match="closed"):
        cell.get()
