"""8-bit codes with one scale per block, for gathers of sharded parameters and for frozen shards.

Source: ZeRO++ (arXiv 2306.10209), qwZ; MixZ++ for frozen parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.mesh.compressed.quantized import gather_codes_through, quantized_gather_through
from mpispeed.native.block_quant import default_block, dequantize, quantize
from mpispeed.native.codes import Coded, Grid
from mpispeed.store.placement import Placement, moves
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def all_gather_quantized(
    mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
) -> None:
    """All-gather of 8-bit codes: every rank, the owner too, ends with the same rounded values.

    Block length: `native.block_quant.default_block` of the shard. Integers and fp64 travel as they are.

    Collective over: the axes over which `source` is sharded and `target` is not.
    """
    if out.dtype not in _FLOATS:
        all_gather_into(mesh, out, shard, source, target, padded)
        return
    quantized_gather_through(_groups(mesh, source, target), out, shard, block=default_block(shard.numel()))


class Codes:
    """A stored shard in 8 bits, for parameters that are never updated."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.numel, self.dtype = shard.numel(), shard.dtype
        self._grid = Grid(self.numel, default_block(self.numel))
        self._onebit = Coded.zeros(self._grid, 8, shard.device)
        self.keep(shard)

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """True for dtypes that can be quantized."""
        return dtype in _FLOATS

    def keep(self, shard: torch.Tensor) -> None:
        """Replace the shard. Shapes: shard [numel]."""
        quantize(self._onebit, shard.to(self._onebit.codes.device), self._grid)

    def values(self) -> torch.Tensor:
        """The shard, rounded. Shapes: [numel]."""
        out = torch.empty(self.numel, dtype=self.dtype, device=self._onebit.codes.device)
        dequantize(out, self._onebit, self._grid)
        return out

    def all_gather_into(self, mesh: Mesh, out: torch.Tensor, source: Placement, target: Placement) -> None:
        """Gather the codes of all ranks into `out`, dequantized.

        Collective over: the axes over which `source` is sharded and `target` is not.
        """
        gather_codes_through(_groups(mesh, source, target), out, self._onebit, block=self._grid.block)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._onebit.codes.nbytes + self._onebit.scales.nbytes


def _groups(mesh: Mesh, source: Placement, target: Placement) -> list[Comm]:
    return [mesh[move.axes[0]] for move in moves(source, target)]
