"""Ranges of swapped tensors, part by part."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import StoreError
from mpispeed.engine.state.global_layout import read_parts
from mpispeed.native import block_io
from mpispeed.store.layout import Span
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import STEP, MemoryTensor
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import MASTER, SwapPlan, Tiers

NUMEL = 5 * STEP + 77


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def swapped(request):
    """Values, and a cell that holds them in a swap file with one buffer, or two."""
    values = torch.randn(NUMEL).to(request.param)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        cells, all_tiers = {}, []
        for name, ahead in (("one", False), ("two", True)):
            plan = SwapPlan(
                {(MASTER, 0): (NUMEL, request.param)}, states_bytes=(1 + ahead) * 2 * STEP * 4, reads_ahead=ahead
            )
            folder = SwapFolder(Path(root), f"{run_name()}-{name}", 0)
            tiers = Tiers(plan, {MASTER: folder})
            all_tiers.append(tiers)
            cells[name] = tiers.keep(MASTER, 0, values), plan.window_elements
        yield values, cells
        for tiers in all_tiers:
            tiers.close()


@settings(max_examples=60)
@given(data=st.data())
def test_parts_make_up_the_range(swapped, data):
    values, cells = swapped
    cell, longest = cells[data.draw(st.sampled_from(["one", "two"]))]
    start = data.draw(st.integers(0, NUMEL))
    stop = data.draw(st.integers(start, NUMEL))
    length = data.draw(st.sampled_from([STEP, longest]))
    for source in (cell, MemoryTensor(values)):
        parts = [part.clone() for part in read_parts(source, Span(start, stop), length)]
        assert all(0 < part.numel() <= length for part in parts)
        assert torch.equal(torch.cat([values[:0], *parts]), values[start:stop])


@pytest.mark.parametrize("name", ["one", "two"])
def test_buffers_come_back_when_nobody_asks_on_or_reading_fails(swapped, name):
    values, cells = swapped
    cell, longest = cells[name]
    for _ in range(4):
        parts = read_parts(cell, Span(5, NUMEL), STEP)
        assert torch.equal(next(parts), values[5:STEP])
        parts.close()
        block_io.inject("read", nth=2, errno=5)
        with pytest.raises(StoreError, match="could not be read"):
            list(read_parts(cell, Span(0, NUMEL), STEP))
    block_io.inject("read", nth=0)
    assert torch.equal(torch.cat([part.clone() for part in read_parts(cell, Span(0, NUMEL), longest)]), values)
