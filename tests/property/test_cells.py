"""A swapped cell under any row of operations is the tensor that a cell in memory would be."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import STEP, MemoryTensor
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import SwapPlan, Tiers

NUMEL = 4 * STEP + 7
PARTS = 5
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(-9, 9)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("get"), st.just(0)),
    st.tuples(st.just("walk"), st.integers(-9, 9)),  # all ranges in order, as an update does
    st.tuples(st.just("look"), st.integers(0, PARTS - 1)),
    st.tuples(st.just("ahead"), st.integers(0, PARTS - 1)),  # lent, and given back at the end
)


def span(part):
    return part * STEP, min((part + 1) * STEP, NUMEL)


def walk(cell, value):
    for part in range(PARTS):
        lease = cell.lend(*span(part))
        lease.wait().mul_(2).add_(value)
        lease.give_back(changed=True)


@given(st.lists(OPERATIONS, max_size=12), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_swapped_cell_is_a_cell(tmp_path_factory, operations, dtype):
    root = tmp_path_factory.mktemp("cells")
    plan = SwapPlan({("x", 0): (NUMEL, dtype)}, states_bytes=STEP * dtype.itemsize * 2, reads_ahead=True)
    tiers = Tiers(plan, {"x": SwapFolder(root, run_name(), 0)})
    swapped, known = tiers.zeros("x", 0, NUMEL, dtype), MemoryTensor(torch.zeros(NUMEL, dtype=dtype))
    ahead = []
    try:
        for name, value in operations:
            if name == "put":
                values = torch.arange(NUMEL).remainder(97).add(value).to(dtype)
                swapped.put(values)
                known.put(values)
            elif name == "clear":
                swapped.clear()
                known.clear()
            elif name == "walk":
                walk(swapped, value)
                walk(known, value)
                tiers.settle()
            elif name == "look":
                lease = swapped.lend(*span(value))
                assert torch.equal(lease.wait(), known.get()[slice(*span(value))])
                lease.give_back(changed=False)
            elif name == "ahead" and not ahead:
                ahead.append(swapped.lend(*span(value)))
            assert torch.equal(swapped.get(), known.get())
        for lease in ahead:
            lease.give_back(changed=False)
        assert tiers.buffer_bytes <= plan.states_bytes
    finally:
        tiers.close()
    assert list(root.iterdir()) == []
