"""States in 8 and 16 bits on a device: launches the kernels of `cuda/bits`, which write the bytes of the host loops.

`state_codes` checks and dispatches; nothing here waits for the device.
"""

from __future__ import annotations

import struct

from torch import Tensor

from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import Launcher

_THREADS = 256
_ENCODED = 256 * _THREADS // 32  # elements of a thread block: each warp has those of a scale
_DECODED = 8 * _THREADS
_RUN, _LANES = 128, 16  # elements and threads that share sixteen counters
_BLOCKS_OF_PROCESSOR = 8

Draw = tuple[int, int, int]
"""Seed, step, number of the first element."""


def encode8(launcher: Launcher, codes: Tensor, scales: Tensor, x: Tensor, *, signed: bool, draw: Draw | None) -> None:
    """As `state_codes.encode8`."""
    name = f"state_encode8_{'signed' if signed else 'unsigned'}{'' if draw is None else '_drawn'}"
    places = (codes.data_ptr(), scales.data_ptr(), x.data_ptr())
    packed = struct.pack("QQQQ", x.numel(), *(draw or (0, 0, 0)))
    launcher.launch(name, (-(-x.numel() // _ENCODED), 1, 1), (_THREADS, 1, 1), *places, packed)


def decode8(launcher: Launcher, out: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
    """As `state_codes.decode8`."""
    name = f"state_decode8_{'signed' if signed else 'unsigned'}"
    places = (out.data_ptr(), codes.data_ptr(), scales.data_ptr())
    launcher.launch(name, (-(-out.numel() // _DECODED), 1, 1), (_THREADS, 1, 1), *places, out.numel())


def round_stochastic(launcher: Launcher, out: Tensor, x: Tensor, draw: Draw) -> None:
    """As `state_codes.round_stochastic`."""
    runs = -(-(draw[2] + x.numel()) // _RUN) - draw[2] // _RUN
    grid = (-(-runs * _LANES // _THREADS), 1, 1)
    packed = struct.pack("QQQQ", x.numel(), *draw)
    launcher.launch(f"state_round_{TAGS[out.dtype]}", grid, (_THREADS, 1, 1), out.data_ptr(), x.data_ptr(), packed)


def split(launcher: Launcher, x: Tensor, high: Tensor, low: Tensor) -> None:
    """As `state_codes.split`."""
    _pair(launcher, "split", high, (high, low, x))


def join(launcher: Launcher, out: Tensor, high: Tensor, low: Tensor) -> None:
    """As `state_codes.join`."""
    _pair(launcher, "join", high, (out, high, low))


def _pair(launcher: Launcher, what: str, high: Tensor, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    blocks = min(-(-high.numel() // _THREADS), _BLOCKS_OF_PROCESSOR * launcher.processors)
    places = [x.data_ptr() for x in tensors]
    launcher.launch(f"state_{what}_{TAGS[high.dtype]}", (blocks, 1, 1), (_THREADS, 1, 1), *places, high.numel())
