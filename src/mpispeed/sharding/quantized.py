"""Codes with one scale per block: 8 bits for gathers of sharded parameters and frozen shards, 4 for sums of gradients.

Source: ZeRO++ (arXiv 2306.10209), qwZ and qgZ; MixZ++ for frozen parameters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from mpispeed.base import log as logs
from mpispeed.mesh.compressed.quantized import (
    Feedback,
    gather_codes_through,
    quantized_gather_through,
    quantized_reduce_scatter,
)
from mpispeed.native.block_quant import default_block, dequantize, quantize
from mpispeed.native.codes import Coded, Grid
from mpispeed.sharding.reducers import Listener
from mpispeed.store.layout import BLOCK
from mpispeed.store.placement import Placement, moves
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.reducers import Reducer
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Unit

log = logging.getLogger(__name__)

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
        self._coded = Coded.zeros(self._grid, 8, shard.device)
        self.keep(shard)

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """True for dtypes that can be quantized."""
        return dtype in _FLOATS

    def keep(self, shard: torch.Tensor) -> None:
        """Replace the shard. Shapes: shard [numel]."""
        quantize(self._coded, shard.to(self._coded.codes.device), self._grid)

    def values(self) -> torch.Tensor:
        """The shard, rounded. Shapes: [numel]."""
        out = torch.empty(self.numel, dtype=self.dtype, device=self._coded.codes.device)
        dequantize(out, self._coded, self._grid)
        return out

    def all_gather_into(self, mesh: Mesh, out: torch.Tensor, source: Placement, target: Placement) -> None:
        """Gather the codes of all ranks into `out`, dequantized.

        Collective over: the axes over which `source` is sharded and `target` is not.
        """
        gather_codes_through(_groups(mesh, source, target), out, self._coded, block=self._grid.block)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self._coded.codes.nbytes + self._coded.scales.nbytes


def _groups(mesh: Mesh, source: Placement, target: Placement) -> list[Comm]:
    return [mesh[move.axes[0]] for move in moves(source, target)]


class QuantizedReducer(Listener):
    """Sums in two hops of 4-bit codes, inside nodes first; for gradients sharded over `inner`, then `outer`.

    Units of vectors alone (norms, biases), fp64 units, and units sharded over other axes are summed as they are.

    Attributes:
        axes: `inner` and `outer`.
        block: elements with one scale.
        codes_inner: the first hop is coded too; else only the second.

    Source: ZeRO++ (arXiv 2306.10209), qgZ.
    """

    def __init__(
        self,
        inner: str,
        outer: str,
        plain: Reducer,
        *,
        block: int = BLOCK,
        feedback: Callable[[], Feedback] | None,
        codes_inner: bool = True,
    ) -> None:
        """Args: `plain` reduces units that are not quantized; `feedback` makes the error feedback of one unit."""
        self.axes, self._plain, self.block, self.codes_inner = (inner, outer), plain, block, codes_inner
        self._make_feedback = feedback
        self._feedbacks: dict[int, Feedback] = {}

    @property
    def keeps_errors(self) -> bool:
        """True with error feedback."""
        return self._make_feedback is not None

    @property
    def uses(self) -> int:
        """Sums since errors were last forgotten; 0 without error feedback."""
        return max((feedback.uses for feedback in self._feedbacks.values()), default=0)

    @property
    def error_bytes(self) -> int:
        """Bytes of errors on this rank."""
        return sum(feedback.nbytes for feedback in self._feedbacks.values())

    def takes(self, unit: Unit, dtype: torch.dtype) -> bool:
        """True if the unit's gradients, sent in `dtype`, are quantized."""
        is_made_of_vectors = all(len(entry.shape) < 2 for entry in unit.layout.entries)
        return dtype.itemsize <= 4 and not is_made_of_vectors and unit.states.master.axes == self.axes

    def feedback_of(self, unit: Unit) -> Feedback | None:
        """The error feedback of a unit that is quantized; None without any."""
        if self._make_feedback is None:
            return None
        return self._feedbacks.get(unit.index) or self._feedbacks.setdefault(unit.index, self._make_feedback())

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`."""
        if not self.takes(unit, wire.dtype):
            text = (
                f"unit {unit.name!r} holds vectors or fp64 values alone, or parameters of which not all data ranks "
                "have copies; its gradients are not quantized"
            )
            logs.once(log, logging.INFO, text)
            self._plain(mesh, unit, wire, target, scale, arena)
            return
        for hole in unit.layout.holes():
            wire[
                hole.slice
            ].zero_()  # an overflow has made whole blocks NaN, and accumulators that rest whole keep that
        (inner, outer), kept = (mesh[axis] for axis in self.axes), self.feedback_of(unit)
        quantized_reduce_scatter(
            inner, outer, target, wire, block=self.block, scale=scale, feedback=kept, codes_inner=self.codes_inner
        )

    def adjust(self, factor: float, *, is_overflow: bool) -> None:
        """Forget errors after an overflow; otherwise scale them with the loss."""
        for feedback in self._feedbacks.values():
            if is_overflow:
                feedback.clear()
            elif factor != 1.0:
                feedback.rescale(factor)
