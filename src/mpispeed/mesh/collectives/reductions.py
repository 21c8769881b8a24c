"""Reductions done here rather than by the transport: a fixed tree over ranks, in fp32 for 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpispeed.native.reduce import tree_reduce, tree_sum


def combine(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, *, scale: float = 1.0, threads: int = 1) -> None:
    """Reduce `parts` in list order by neighbouring pairs and round once into `out`.

    `op` is "sum" (times `scale`), "prod", "min" or "max"; an average is a sum with a scale.
    """
    if op == "sum":
        tree_sum(out, parts, scale=scale, threads=threads)
    else:
        tree_reduce(out, parts, op)
