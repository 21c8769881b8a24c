"""Cut parameters that travel, and frozen ones that rest, as 8-bit codes with one scale per block.

Source: ZeRO++ (arXiv 2306.10209), qwZ; MixZ++ for frozen parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.codec import gather_codes_through, quantized_gather_through
from mpispeed.native.block_quant import Coded, Grid, default_block, dequantize, quantize
from mpispeed.store.move import widen
from mpispeed.store.placement import Placement, moves

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def widen_quantized(
    mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
) -> None:
    """`store.move.widen` with 8-bit codes on the way: every rank, the owner too, ends with the same rounded values.

    Block length: `native.block_quant.default_block` of the shard. Integers and fp64 travel as they are.

    Collective over: the axes by which `source` is cut and `target` is not.
    """
    if out.dtype not in _FLOATS:
        widen(mesh, out, shard, source, target, padded)
        return
    quantized_gather_through(_groups(mesh, source, target), out, shard, block=default_block(shard.numel()))


class Codes:
    """A shard at rest in 8 bits, for parameters that are never updated."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.numel, self.dtype = shard.numel(), shard.dtype
        self._grid = Grid(self.numel, default_block(self.numel))
        self._coded = Coded.zeros(self._grid, 8, shard.device)
        self.keep(shard)

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """True for dtypes that can be quantized."""
        return dtype in _FLOATS

    def keep(self, shard: torch.Tensor) -> None:
        """Replace what is kept. Shapes: shard [numel]."""
        quantize(self._coded, shard.to(self._coded.codes.device), self._grid)

    def values(self) -> torch.Tensor:
        """What is kept, rounded. Shapes: [numel]."""
        out = torch.empty(self.numel, dtype=self.dtype, device=self._coded.codes.device)
        dequantize(out, self._coded, self._grid)
        return out

    def widen(self, mesh: Mesh, out: torch.Tensor, source: Placement, target: Placement) -> None:
        """Collect the codes of all ranks in `out`, dequantized.

        Collective over: the axes by which `source` is cut and `target` is not.
        """
        gather_codes_through(_groups(mesh, source, target), out, self._coded, block=self._grid.block)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._coded.codes.nbytes + self._coded.scales.nbytes


def _groups(mesh: Mesh, source: Placement, target: Placement) -> list[Comm]:
    return [mesh[move.axes[0]] for move in moves(source, target)]
