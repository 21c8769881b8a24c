"""Buffers of a device combined in the tree of `native.reduce`, with its bits; nothing waits for the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from mpispeed.native.cuda import launcher
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.reduce import HALF_DTYPES, PAIRWISE

MOST_PARTS = 8
"""Of a sum by one kernel: the ranks of a node, mostly."""

_THREADS, _PACKET_BYTES = 256, 16


@torch.no_grad()
def combine(out: Tensor, parts: Sequence[Tensor], op: str, scale: float = 1.0) -> None:
    """Combine `parts` in list order by neighbouring pairs, and round once into `out`.

    `op` is "sum" (times `scale`), "prod", "min", "max" or, of integers, bitwise. 16-bit floats are worked on in fp32.
    `out` may be one of the parts, and fp32 where they have 16 bits. Up to eight parts of fp32, bf16 or fp16 are summed
    by one kernel where there are kernels; all else by torch.

    Shapes:
        All tensors are flat and of equal length, on one device; parts may lie in mapped memory.
    """
    dtype = parts[0].dtype
    runs = launcher.for_tensor(out) if op == "sum" and dtype in TAGS and len(parts) <= MOST_PARTS else None
    if runs is None or out.dtype not in (dtype, torch.float32):
        combine_reference(out, parts, op, scale)
    elif out.numel():
        addresses = [part.data_ptr() for part in parts] + [0] * (MOST_PARTS - len(parts))
        packed = struct.pack(f"{MOST_PARTS}QQfI", *addresses, out.numel(), c_float(scale).value, len(parts))
        name = f"tree_sum_{TAGS[dtype]}" + ("" if out.dtype == dtype else "_f32")
        blocks = -(-out.numel() * dtype.itemsize // (_THREADS * _PACKET_BYTES))
        runs.launch(name, (blocks, 1, 1), (_THREADS, 1, 1), out.data_ptr(), packed)


@torch.no_grad()
def combine_reference(out: Tensor, parts: Sequence[Tensor], op: str, scale: float = 1.0) -> None:
    """The same in torch, for any dtype that torch computes with and any number of parts."""
    join = PAIRWISE[op]
    level = [x.float() if x.dtype in HALF_DTYPES else x for x in parts]
    while len(level) > 1:
        odd = level[len(level) - len(level) % 2 :]
        level = [join(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)] + odd
    out.copy_(level[0] if scale == 1.0 else level[0] * scale)
