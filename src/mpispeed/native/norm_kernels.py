"""Launches of the kernels of norms: which kernel runs on what grid, and which arguments follow the pointers.

What a launch needs beside addresses depends on sizes, dtype and alignment alone, and is kept by the launcher; a call
looks it up and hands over pointers. Nothing here is seen by autograd: tensors are contiguous and of kinds that kernels
take.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from mpispeed.native.columns import tile, vector
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import is_built
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import Launcher, Prepared, Size, for_tensor, keep

_KEPT = 4  # vectors of a thread that keeps a row in registers
_GRAD_ROWS = ((8, 2048), (16, 8192))  # columns of a thread, and columns of the longest row for that

Key = tuple[Any, ...]


def prepare_forward(runs: Launcher, key: Key) -> Prepared:
    """The launch of a forward pass: of y, sum, mean, rstd, x, residual, weight, bias."""
    _, is_centered, count, cols, dtype, eps, is_aligned = key
    way, grid, threads, terms = forward_shape(dtype, count // cols, cols, eps, is_aligned)
    name = f"{'layer' if is_centered else 'rms'}_norm_{way}_{TAGS[dtype]}"
    made: Prepared = keep(runs, key, runs.prepare(name, grid, threads, terms))
    return made


def prepare_backward(runs: Launcher, key: Key) -> compiled.NormLaunches:
    """The launches of a backward pass."""
    _, is_centered, count, cols, dtype, is_aligned, with_weight, with_bias = key
    rows = count // cols
    is_wide = is_aligned and cols % vector(dtype) == 0
    norm, wanted = "layer" if is_centered else "rms", with_weight + with_bias
    width = next((w for w, limit in _GRAD_ROWS if is_wide and cols <= limit and cols % w == 0), 0)
    columns = None
    if width:
        launch, parts = _kept(runs, norm, dtype, rows, cols, width)
    else:
        launch, columns, parts = _any(runs, norm, dtype, rows, cols, is_wide)
    add_up = prepare_add_up(runs, dtype, parts, cols, wanted) if wanted else None
    made = compiled.NormLaunches(launch, columns if wanted else None, add_up, parts * cols)
    keep(runs, key, made)
    return made


def _calls() -> compiled.NormCalls:
    return compiled.NormCalls(prepare_forward, prepare_backward, for_tensor, TAGS)


calls: compiled.NormCalls = _calls() if is_built else None  # type: ignore[assignment]
"""Norms by kernels; `norm` sets the function of autograd that it applies.

None where the launcher was not built, and then no tensor has a launcher.
"""


def forward_shape(
    dtype: torch.dtype, rows: int, cols: int, eps: float, is_aligned: bool
) -> tuple[str, Size, Size, bytes]:
    """Choice between the two kernels of a forward pass, with its grid, its block and its packed terms."""
    wide = is_aligned and cols % vector(dtype) == 0
    vectors = cols // vector(dtype)
    is_kept = wide and vectors <= 1024 * _KEPT
    threads = _whole_warps(-(-vectors // _KEPT)) if is_kept else _whole_warps(min(1024, vectors if wide else cols))
    down = 256 // threads if is_kept and threads == 32 else 1
    terms = struct.pack("QQfi", rows, cols, eps, wide)
    return "kept" if is_kept else "any", (-(-rows // down), 1, 1), (threads, down, 1), terms


def _whole_warps(threads: int) -> int:
    return (threads + 31) // 32 * 32


def _kept(runs: Launcher, norm: str, dtype: torch.dtype, rows: int, cols: int, width: int) -> tuple[Prepared, int]:
    """Everything in one pass: blocks walk over rows and keep sums of their columns."""
    across = _whole_warps(cols // width)
    down = max(1, 256 // across)
    # As many blocks as the registers of a multiprocessor hold at once (launch bounds of the kernel).
    at_once = (3 if dtype.itemsize == 2 else 2) if width == 8 else 1 if across > 256 else 2
    blocks = min(-(-rows // down), runs.processors * at_once)
    shared = across * down * width * 4 if down > 1 else 0
    terms = struct.pack("QQii", rows, cols, 1, 0)
    name = f"{norm}_norm_backward_{width}_{TAGS[dtype]}"
    return runs.prepare(name, (blocks, 1, 1), (across, down, 1), terms, shared), blocks


def _any(
    runs: Launcher, norm: str, dtype: torch.dtype, rows: int, cols: int, is_wide: bool
) -> tuple[Prepared, Prepared, int]:
    width = vector(dtype) if is_wide else 1
    threads = _whole_warps(min(1024, cols // width))
    terms = struct.pack("QQii", rows, cols, is_wide, 0)
    launch = runs.prepare(f"{norm}_norm_backward_any_{TAGS[dtype]}", (rows, 1, 1), (threads, 1, 1), terms)
    grid, block = tile(runs, rows, cols, width)
    shared = block[0] * block[1] * width * 4
    return launch, runs.prepare(f"{norm}_norm_columns_{TAGS[dtype]}", grid, block, terms, shared), grid[1]


def prepare_add_up(runs: Launcher, dtype: torch.dtype, rows: int, cols: int, vectors: int) -> Prepared:
    """Adds partial sums of one or two vectors: to be called with the first, the second, and where the sums begin."""
    return runs.prepare(
        f"column_sum_{TAGS[dtype]}", (-(-cols // 32), vectors, 1), (32, 32, 1), struct.pack("QQ", rows, cols)
    )
