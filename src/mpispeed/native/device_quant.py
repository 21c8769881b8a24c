"""Block quantization on a device: launches the kernels of `cuda/quant`, which write the same bytes as the host loops.

`block_quant` checks and dispatches; nothing here reads a value on the host or waits for the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from mpispeed.native.codes import Coded, Grid
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher

MOST_PARTS = 128
"""Addends of one launch: their addresses travel with its arguments. More are summed in several."""

_WARP = 32
_WARPS = 8  # of a thread block in which each warp works for itself
_ENCODED, _ENCODED_WITH_ERROR, _DECODED = 16, 8, 16  # elements that a thread holds
_HELD, _HELD_OF_SUMS = 8192, 7168  # elements that a thread block holds; less for sums of 8-bit codes


def encode(
    launcher: Launcher,
    coded: Coded,
    x: Tensor | None,
    parts: Sequence[Coded],
    grid: Grid,
    error: Coded | None,
    beta: float,
) -> None:
    """Quantize `x`, or, if that is None, the sum of `parts` into `coded`; as `block_quant.quantize`."""
    if not grid.numel:
        return
    if x is None and len(parts) > MOST_PARTS:
        x = torch.empty(grid.numel, dtype=torch.float32, device=coded.scales.device)
        decode(launcher, x, parts, grid, 1.0, is_added=False)
    held = _HELD if x is not None or parts[0].bits == 4 else _HELD_OF_SUMS
    packed, blocks, threads = _encoding(grid, beta, held, has_error=error is not None)
    suffix = "" if error is None else "_error"
    kept = (0, 0) if error is None else (error.codes.data_ptr(), error.scales.data_ptr())
    target = (coded.codes.data_ptr(), coded.scales.data_ptr())
    size, shape = (blocks, 1, 1), (threads, 1, 1)
    if x is not None:
        name = f"block_quantize{coded.bits}{suffix}_{TAGS[x.dtype]}"
        launcher.launch(name, size, shape, x.data_ptr(), *target, *kept, packed)
    else:
        name = f"block_requantize{parts[0].bits}_{coded.bits}{suffix}"
        launcher.launch(name, size, shape, *target, *kept, packed, _addresses(parts))


def decode(
    launcher: Launcher, out: Tensor, parts: Sequence[Coded], grid: Grid, factor: float, *, is_added: bool
) -> None:
    """Fill `out` with `factor` times the sum of `parts`, or of `out` and them; as `block_quant.dequantize_sum`."""
    if not grid.numel:
        return
    if len(parts) > MOST_PARTS:
        total = out.float() if is_added else torch.empty(grid.numel, dtype=torch.float32, device=out.device)
        for begin in range(0, len(parts), MOST_PARTS):
            some, is_first = parts[begin : begin + MOST_PARTS], begin == 0
            decode(launcher, total, some, grid, 1.0, is_added=is_added or not is_first)
        out.copy_(total if factor == 1.0 else total * factor)
        return
    each = -(-grid.piece // (_WARP * _DECODED))
    units = grid.pieces * each
    numbers = (units, grid.piece, each, grid.scales // grid.pieces, grid.codes(4) // grid.pieces)
    packed = struct.pack("QQQQQIf", *numbers, grid.block, c_float(factor).value)
    name = f"block_dequantize{parts[0].bits}{'_add' if is_added else ''}_{TAGS[out.dtype]}"
    size = (-(-units // _WARPS), 1, 1)
    launcher.launch(name, size, (_WARPS * _WARP, 1, 1), out.data_ptr(), packed, _addresses(parts))


def _encoding(grid: Grid, beta: float, held: int, *, has_error: bool) -> tuple[bytes, int, int]:
    """The numbers of a launch, its thread blocks, and the threads of each, which hold `held` elements at most."""
    own = _ENCODED_WITH_ERROR if has_error else _ENCODED
    team = -(-min(grid.block, grid.piece, held) // (_WARP * own)) * _WARP
    packed = struct.pack(
        "QQQQIIff",
        grid.scales, grid.piece, grid.scales // grid.pieces, grid.codes(4) // grid.pieces, grid.block, team,
        beta, 1.0 - beta,
    )  # fmt: skip
    if team == _WARP:
        return packed, -(-grid.scales // _WARPS), _WARPS * _WARP
    return packed, grid.scales, team


def _addresses(parts: Sequence[Coded]) -> bytes:
    codes = [part.codes.data_ptr() for part in parts]
    scales = [part.scales.data_ptr() for part in parts]
    rest = [0] * (MOST_PARTS - len(parts))
    return struct.pack(f"{2 * MOST_PARTS + 1}Q", *codes, *rest, *scales, *rest, len(parts))
