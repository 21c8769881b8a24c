"""Common parts of wrappers whose kernels walk down columns: shapes of launches, and sums over rows in a fixed order.

Partial sums of rows are made by the kernels (cuda/include/mpispeed_columns.cuh) and added up by `add_up`, so that a
gradient of a bias has the same bits in every run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher

TILE_THREADS = 256


def vector(dtype: torch.dtype) -> int:
    """Elements in 16 bytes, the widest access of a thread."""
    return 16 // dtype.itemsize


def inner_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of a reference's computation and of statistics: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_wide(cols: int, *tensors: Tensor | None) -> bool:
    """True if rows of `cols` elements of all these tensors can be moved by 16 bytes."""
    return not any(x is not None and (x.data_ptr() % 16 or cols * x.element_size() % 16) for x in tensors)


def pointer(x: Tensor | None) -> int:
    """Address of the data; 0 for None and for a tensor without elements."""
    return 0 if x is None else x.data_ptr()


def tile(
    launcher: Launcher, rows: int, cols: int, width: int, at_once: int = 4
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block that walk down columns, with `width` columns in a thread; grid y counts rows of partial sums.

    `at_once` blocks of the kernel fit on a multiprocessor (its launch bounds).
    """
    return _tile(launcher.processors * at_once, rows, cols, width)


@lru_cache(4096)
def _tile(places: int, rows: int, cols: int, width: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    vectors = -(-cols // width)
    x = min(32, 1 << (vectors - 1).bit_length())
    if width > 1:  # narrower blocks leave fewer threads without columns; eight vectors are 128 bytes
        x = next((x for x in (32, 16, 8) if -(-vectors // x) * x <= 1.05 * vectors), x)
    y = TILE_THREADS // x
    across = -(-vectors // x)
    down = min(-(-rows // y), _rows_of_blocks(across, places), 65535)
    return (across, down, 1), (x, y, 1)


def _rows_of_blocks(across: int, places: int) -> int:
    """Number of rows of `across` blocks that fill `places` once, or a few times if fewer stay empty then."""
    best, best_part = 1, 0.0
    for times in range(1, 9):
        down = max(1, times * places // across)
        blocks = across * down
        part = blocks / (-(-blocks // places) * places)
        if part > best_part + 0.02:
            best, best_part = down, part
    return best


def add_up(launcher: Launcher, partial: Tensor, outs: tuple[Tensor | None, ...]) -> None:
    """Add the rows of partial sums into one or two vectors. Shapes: partial [vectors, rows, cols] fp32, outs [cols].

    A vector that is None is left out, and its partial sums need not be written.
    """
    wanted = [k for k, out in enumerate(outs) if out is not None]
    if not wanted:
        return
    rows, cols = partial.shape[1:]
    first = outs[wanted[0]]
    name = f"column_sum_{TAGS[first.dtype]}"  # type: ignore[union-attr]
    second = outs[wanted[1]] if len(wanted) == 2 else None
    grid = (-(-cols // 32), len(wanted), 1)
    start = partial[wanted[0]].data_ptr()
    launcher.launch(name, grid, (32, 32, 1), pointer(first), pointer(second), start, rows, cols)
