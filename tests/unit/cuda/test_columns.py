"""Shapes of launches that walk down columns."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import columns
from mpispeed.native.cuda import launcher
from tests.helpers.cuda_host import HostLauncher


class H200:
    """A device with as many multiprocessors; launches nothing."""

    processors = 132


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("cols", [1, 3, 24, 33, 96, 1000, 1600, 4096, 28672, 76800, 1 << 20])
@pytest.mark.parametrize("rows", [1, 100, 8192, 1 << 20])
def test_a_grid_has_all_columns_and_fills_the_device(rows, cols, width):
    (across, down, one), (x, y, _) = columns.tile(H200(), rows, cols, width)
    assert one == 1
    assert x * y == columns.TILE_THREADS
    assert (across - 1) * x * width < cols <= across * x * width
    assert 1 <= down <= min(65535, -(-rows // y))
    if down < -(-rows // y):  # not limited by rows: the last turn of blocks is nearly full
        turns = -(-across * down // (4 * H200.processors))
        assert across * down >= 0.9 * turns * 4 * H200.processors


def test_wide_columns_leave_few_threads_idle():
    for cols in (1600, 4096, 5120, 12288):
        (across, _, _), (x, _, _) = columns.tile(H200(), 8192, cols, 8)
        assert across * x * 8 <= 1.05 * cols


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 33), (100, 40), (65, 8)])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_partial_sums_are_added_up(rows, cols, dtype, is_reversed):
    torch.manual_seed(rows)
    partial = torch.randn(2, rows, cols)
    outs = torch.empty(cols, dtype=dtype), torch.empty(cols, dtype=dtype)
    wanted = partial.double().sum(1)
    host = HostLauncher(is_reversed=is_reversed)
    for chosen in (outs, (outs[0], None), (None, outs[1]), (None, None)):
        for out in outs:
            out.fill_(7)
        columns.add_up(host, partial, chosen)
        for k, out in enumerate(outs):
            exact = wanted[k] if chosen[k] is not None else torch.full((cols,), 7.0, dtype=torch.float64)
            # Up to 100 additions in fp32, then a rounding to the dtype.
            assert torch.allclose(exact, out.double(), rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_is_wide_looks_at_every_tensor():
    whole = torch.zeros(65)
    assert columns.is_wide(64, whole[:64], None)
    assert not columns.is_wide(64, whole[:64], whole[1:])
    assert not columns.is_wide(65, whole)
    assert launcher.for_tensor(whole) is None
