"""Quantized buffers: integers of 8 or 4 bits, fp32 scales, and the grid of blocks that share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_UNIT = 256
"""Elements. Block lengths are multiples of it, as are the cuts of flat buffers."""

BLOCK_MOST = 1 << 16
"""Elements. A block has to stay in cache between the two looks at it."""

LEVELS = {8: 127, 4: 7}
"""The largest code, by bits."""

CODE_DTYPES = {8: torch.int8, 4: torch.uint8}
BITS = {dtype: bits for bits, dtype in CODE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Grid:
    """Division into blocks: `pieces` equal pieces of `piece` elements; in each, blocks are counted from its start.

    The last block of a piece may be short. Pieces are sent to different ranks.

    Raises:
        ValueError: a number is out of range.
    """

    piece: int
    block: int
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.block % BLOCK_UNIT or not BLOCK_UNIT <= self.block <= BLOCK_MOST:
            msg = f"blocks of {self.block} elements; use a multiple of {BLOCK_UNIT} from {BLOCK_UNIT} to {BLOCK_MOST}"
            raise ValueError(msg)
        if self.piece < 0 or self.pieces < 1:
            msg = f"{self.pieces} pieces of {self.piece} elements; pass at least 1 piece of at least 0 elements"
            raise ValueError(msg)

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.pieces * self.piece

    @property
    def scales(self) -> int:
        """Scales in all."""
        return self.pieces * -(-self.piece // self.block)

    def codes(self, bits: int) -> int:
        """Bytes of all codes; a piece starts at a full byte."""
        return self.pieces * (self.piece if bits == 8 else -(-self.piece // 2))

    def nbytes(self, bits: int) -> int:
        """Bytes of codes and scales."""
        return self.codes(bits) + 4 * self.scales


class Coded(NamedTuple):
    """A quantized buffer: codes (int8, or uint8 with two codes per byte, low nibble first) and fp32 scales."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, grid: Grid, bits: int, device: torch.device | str = "cpu") -> Coded:
        """The code of a buffer of zeros, on `device`.

        Raises:
            ValueError: `bits` is not 8 or 4.
        """
        if bits not in LEVELS:
            msg = f"codes of {bits} bits; 8 and 4 are possible"
            raise ValueError(msg)
        codes = torch.zeros(grid.codes(bits), dtype=CODE_DTYPES[bits], device=device)
        return cls(codes, torch.zeros(grid.scales, dtype=torch.float32, device=device))

    @property
    def bits(self) -> int:
        """8 or 4."""
        return BITS[self.codes.dtype]
