"""Sign packing on a device: launches the kernels of `cuda/bits`, with the same bits as the host loops.

`one_bit` checks and dispatches. Sums of squares wait for the device, because scales are numbers on the host. The others
do not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher
from mpispeed.native.exact_squares import LIMBS, partials_of

MOST_PARTS = 256
"""Coded parts of one sum: their addresses travel with the arguments of the launch."""

_THREADS = 256
_WARPS = _THREADS // 32
_TILES_OF_BLOCK, _TILE = 8 * _WARPS, 256
_BLOCKS_OF_PROCESSOR = 8


def compensate(
    launcher: Launcher, error: Tensor, x: Tensor, keep: float, grad: Tensor | None, take: float
) -> list[float]:
    """Add keep * x + take * grad to `error`; squares as from `one_bit.compensate`."""
    return partials_of(start_compensate(launcher, error, x, keep, grad, take))


def start_compensate(
    launcher: Launcher, error: Tensor, x: Tensor, keep: float, grad: Tensor | None, take: float
) -> Tensor:
    """`compensate` without waiting: the sum of squares stays on the device, as limbs of 32 bits."""
    limbs = _limbs(error)
    name = f"sign_mix_{TAGS[x.dtype]}" + ("" if grad is None else f"_{TAGS[grad.dtype]}")
    second = 0 if grad is None else grad.data_ptr()
    terms = struct.pack("Qff", error.numel(), c_float(keep).value, c_float(take).value)
    if error.numel():
        launcher.launch(
            name, _walking(launcher, error), (_THREADS, 1, 1),
            error.data_ptr(), x.data_ptr(), second, limbs.data_ptr(), terms,
        )  # fmt: skip
    return limbs


def add_parts(launcher: Launcher, error: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """Add the sum of at most MOST_PARTS decoded parts to `error`; squares as from `one_bit.add_parts`."""
    return partials_of(start_add_parts(launcher, error, parts, weights))


def start_add_parts(launcher: Launcher, error: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`add_parts` without waiting, as `start_compensate`."""
    limbs, rest = _limbs(error), MOST_PARTS - len(parts)
    addresses = [part.data_ptr() for part in parts] + [0] * rest
    factors = [c_float(weight).value for weight in weights] + [0.0] * rest
    packed = struct.pack(f"{MOST_PARTS}Q{MOST_PARTS}fQQ", *addresses, *factors, len(parts), error.numel())
    if error.numel():
        grid = _walking(launcher, error)
        launcher.launch("sign_sum", grid, (_THREADS, 1, 1), error.data_ptr(), limbs.data_ptr(), packed)
    return limbs


def encode(launcher: Launcher, bits: Tensor, error: Tensor, scale: float) -> None:
    """Write signs and take them away from `error`, as `one_bit.encode`."""
    if not error.numel():
        return
    grid = (-(-error.numel() // (512 * _WARPS)), 1, 1)
    launcher.launch("sign_encode", grid, (_THREADS, 1, 1), bits.data_ptr(), error.data_ptr(), _terms(error, scale))


def decode(launcher: Launcher, out: Tensor, bits: Tensor, scale: float) -> None:
    """Write scale times the signs, as `one_bit.decode`."""
    if not out.numel():
        return
    run = 32 * 4 * 16 // out.element_size()  # elements of a warp
    grid = (-(-out.numel() // (run * _WARPS)), 1, 1)
    name = f"sign_decode_{TAGS[out.dtype]}"
    launcher.launch(name, grid, (_THREADS, 1, 1), out.data_ptr(), bits.data_ptr(), _terms(out, scale))


def _terms(x: Tensor, scale: float) -> bytes:
    return struct.pack("Qf4x", x.numel(), c_float(scale).value)


def _walking(launcher: Launcher, error: Tensor) -> tuple[int, int, int]:
    blocks = -(-error.numel() // (_TILE * _TILES_OF_BLOCK))
    return min(blocks, _BLOCKS_OF_PROCESSOR * launcher.processors), 1, 1


def _limbs(error: Tensor) -> Tensor:
    return torch.zeros(LIMBS, dtype=torch.int64, device=error.device)
