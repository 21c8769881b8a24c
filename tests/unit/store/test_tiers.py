"""What a plan of swap files promises: sizes, windows, and the memory that buffers take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import ALIGNMENT
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import STEP
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import GRAD, IN_MEMORY, MASTER, PARAM, SwapPlan, Tiers, padded_bytes

KINDS = (PARAM, MASTER, GRAD, "exp_avg", "exp_avg_sq")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@st.composite
def plans(draw):
    """Any mix of kinds, units and lengths, with at least the memory of one shortest window."""
    tensors = {}
    for kind in draw(st.sets(st.sampled_from(KINDS), min_size=1)):
        for unit in draw(st.sets(st.integers(0, 5), min_size=1, max_size=4)):
            tensors[kind, unit] = draw(st.integers(0, 200_000)), draw(DTYPES)
    reads_ahead, writes_behind = draw(st.booleans()), draw(st.booleans())
    kinds = len({kind for kind, _ in tensors if kind != PARAM})
    widest = max(dtype.itemsize for _, dtype in tensors.values())
    least = kinds * (1 + reads_ahead + writes_behind) * STEP * widest
    longest = max((numel * d.itemsize for (kind, _), (numel, d) in tensors.items() if kind == PARAM), default=0)
    return SwapPlan(
        tensors,
        states_bytes=least + draw(st.integers(0, 4_000_000)),
        param_bytes=max(longest, STEP * 8) if longest else 0,
        param_buffers=draw(st.integers(1, 4)) if longest else 0,
        reads_ahead=reads_ahead,
        writes_behind=writes_behind,
        reserves=False,
    )


@given(plans())
def test_windows_fit_into_the_memory_given(plan):
    length = plan.window_elements
    widest = max(dtype.itemsize for _, dtype in plan.tensors.values())
    assert length >= STEP
    assert length % STEP == 0
    assert len(plan.window_kinds) * plan.in_flight * length * widest <= plan.states_bytes
    for (kind, _), (_, dtype) in plan.tensors.items():
        if kind == PARAM and plan.param_buffers:
            assert length * dtype.itemsize <= plan.param_bytes


@given(plans())
def test_no_window_is_longer_than_the_longest_tensor(plan):
    longest = max(numel for numel, _ in plan.tensors.values())
    assert plan.window_elements <= max(-(-longest // STEP) * STEP, STEP)


@given(plans())
def test_files_hold_whole_pages_of_every_cell(plan):
    for kind, size in plan.file_bytes.items():
        own = [stored for (other, _), stored in plan.tensors.items() if other == kind]
        assert size == sum(padded_bytes(numel, dtype) for numel, dtype in own)
        assert size % ALIGNMENT == 0
        assert size - sum(numel * dtype.itemsize for numel, dtype in own) < ALIGNMENT * len(own)


def test_a_plan_without_cells_swaps_nothing():
    assert (SwapPlan().file_bytes, SwapPlan().window_kinds, SwapPlan().in_flight) == ({}, (), 1)
    assert not IN_MEMORY.is_swapping
    assert (IN_MEMORY.file_bytes, IN_MEMORY.buffer_bytes, IN_MEMORY.most_buffer_bytes) == (0, 0, 0)
    values = torch.ones(3)
    assert IN_MEMORY.keep(MASTER, 0, values).get() is values
    assert IN_MEMORY.zeros(GRAD, 0, 4, torch.float32).get().tolist() == [0.0] * 4
    IN_MEMORY.settle()


CELLS = {
    (PARAM, 0): (5 * STEP, torch.bfloat16),
    (PARAM, 1): (100, torch.bfloat16),
    (MASTER, 0): (5 * STEP, torch.float32),
    (MASTER, 1): (100, torch.float32),
    ("exp_avg", 0): (5 * STEP, torch.float32),
}


@pytest.fixture
def folder(tmp_path):
    made = SwapFolder(tmp_path, run_name(), 0)
    yield made
    made.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reserves", [False, True])
def test_cells_share_the_file_of_their_kind(folder, reserves):
    plan = SwapPlan(CELLS, states_bytes=10**6, param_bytes=10 * STEP, param_buffers=2, reserves=reserves)
    tiers = Tiers(plan, dict.fromkeys((PARAM, MASTER, "exp_avg"), folder))
    sizes = {path.stem: path.stat().st_size for path in folder.path.glob("*.swap")}
    assert sizes == plan.file_bytes
    tensors = [(tiers.zeros(kind, unit, *stored), stored) for (kind, unit), stored in CELLS.items()]
    for index, (stored, (numel, dtype)) in enumerate(tensors):
        stored.put(torch.full((numel,), index + 1, dtype=dtype))
    for index, (stored, _) in enumerate(tensors):
        assert stored.get().eq(index + 1).all()
    assert not tiers.zeros("exp_avg", 1, 100, torch.float32).is_swapped
    with pytest.raises(StoreError, match="was planned for"):
        tiers.zeros(MASTER, 0, 1, torch.float32)
    tiers.close()
    with pytest.raises(StoreError, match="closed"):
        Tiers.zeros(tiers, "exp_avg", 0, 0, torch.float32)


@pytest.mark.parametrize(("ahead", "behind"), [(False, False), (True, False), (True, True)])
def test_buffers_take_no_more_than_they_may(folder, ahead, behind):
    kinds, given_bytes = 2, 4 * STEP * 4 * 3 + 1000
    plan = SwapPlan(
        CELLS, states_bytes=given_bytes, param_bytes=10 * STEP, param_buffers=3, reads_ahead=ahead, writes_behind=behind
    )
    tiers = Tiers(plan, dict.fromkeys((PARAM, MASTER, "exp_avg"), folder))
    assert tiers.buffer_bytes == 0
    tensors = {key: tiers.zeros(*key, *stored) for key, stored in CELLS.items()}
    length = plan.window_elements
    leases = []
    for start in range(0, 5 * STEP, length):
        stop = min(start + length, 5 * STEP)
        leases.append([tensors[kind, 0].lend(start, stop) for kind in (PARAM, MASTER, "exp_avg")])
    for group in leases:
        for lease in group:
            lease.wait().fill_(1)
            lease.give_back(changed=True)
    tiers.settle()
    assert 0 < tiers.buffer_bytes <= tiers.most_buffer_bytes <= given_bytes + 3 * (10 * STEP + ALIGNMENT)
    assert len(plan.window_kinds) == kinds
    assert all(tensors[kind, 0].get().eq(1).all() for kind in (PARAM, MASTER, "exp_avg"))


def test_a_file_that_cannot_be_made_leaves_nothing(folder):
    plan = SwapPlan({(MASTER, 0): (1 << 58, torch.float32)}, states_bytes=1 << 20)
    with pytest.raises(StoreError, match=r"master\.swap cannot be made"):
        Tiers(plan, {MASTER: folder})
    assert not list(folder.path.glob("*.swap"))
