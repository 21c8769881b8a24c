"""Reductions done here and not by the transport: a fixed tree over ranks, in fp32 for 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mpispeed.mesh.dtypes import HALF_FLOATS
from mpispeed.native.reduce import tree_sum

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, *, scale: float = 1.0, threads: int = 1) -> None:
    """Reduce `parts` in list order by neighbouring pairs and round once into `out`.

    `op` is "sum" (times `scale`), "prod", "min" or "max"; an average is a sum with a scale.
    """
    if op == "sum":
        tree_sum(out, parts, scale=scale, threads=threads)
        return
    wide = torch.float32 if parts[0].dtype in HALF_FLOATS else parts[0].dtype
    level = [part.to(wide) for part in parts]
    while len(level) > 1:
        paired = [_BINARY[op](level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    out.copy_(level[0])
