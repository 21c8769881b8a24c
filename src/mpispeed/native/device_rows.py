"""Rows of a mixture of experts by kernels: what `native.permute` runs where a GPU has them.

Sums over choices and products have the bits of the host's loops; those of `dot` are in fp32, in an order that the width
alone decides. Places are not checked: one that is not there counts as dropped.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from mpispeed.native.cuda import launcher
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher, Size

_THREADS, _WARP, _PACKET_BYTES = 256, 32, 16


def runs_for(x: Tensor) -> Launcher | None:
    """The launcher, where rows of this dtype are done by kernels."""
    return launcher.for_tensor(x) if x.dtype in TAGS else None


def combine(runs: Launcher, out: Tensor, rows: Tensor, index: Tensor, weights: Tensor | None) -> None:
    """As `permute.combine_rows`, after its checks."""
    if out.numel():
        layout = _layout(out.shape[0], rows)
        addresses = (out.data_ptr(), rows.data_ptr(), index.data_ptr(), _address(weights))
        runs.launch(f"row_combine_{TAGS[rows.dtype]}", *layout, *addresses, _numbers(index, rows))


def spread(runs: Launcher, out: Tensor, x: Tensor, index: Tensor, weights: Tensor | None) -> None:
    """As `permute.spread_rows`, after its checks."""
    if not out.numel():
        return
    sources, numbers = torch.full((out.shape[0],), -1, dtype=torch.int64, device=x.device), _numbers(index, out)
    if index.numel():
        grid = (-(-index.numel() // _THREADS), 1, 1)
        runs.launch("row_sources", grid, (_THREADS, 1, 1), sources.data_ptr(), index.data_ptr(), numbers)
    addresses = (out.data_ptr(), x.data_ptr(), sources.data_ptr(), _address(weights))
    runs.launch(f"row_spread_{TAGS[x.dtype]}", *_layout(out.shape[0], x), *addresses, numbers)


def dot(runs: Launcher, out: Tensor, x: Tensor, rows: Tensor, index: Tensor) -> None:
    """As `permute.dot_rows`, after its checks."""
    if out.numel():
        grid, threads = (-(-out.numel() // (_THREADS // _WARP)), 1, 1), (_WARP, _THREADS // _WARP, 1)
        addresses = (out.data_ptr(), x.data_ptr(), rows.data_ptr(), index.data_ptr())
        runs.launch(f"row_dot_{TAGS[x.dtype]}", grid, threads, *addresses, _numbers(index, rows))


def _numbers(index: Tensor, rows: Tensor) -> bytes:
    return struct.pack("QQQQ", index.shape[0], index.shape[1], rows.shape[0], rows.shape[1])


def _layout(count: int, rows: Tensor) -> tuple[Size, Size]:
    """Blocks and threads for so many rows: a warp or more along a row, at most two packets to a thread."""
    packets = -(-rows.shape[1] * rows.element_size() // _PACKET_BYTES)
    along = min(_THREADS, 1 << (max(min(packets, _WARP), -(-packets // 2)) - 1).bit_length())
    rows_of_block = _THREADS // along
    return (-(-count // rows_of_block), 1, 1), (along, rows_of_block, 1)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
