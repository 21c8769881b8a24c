"""A transformer layer as two functions of autograd around the attention, for eager mode on kernels.

The first is the norm in front and the projection to queries, keys and values, the second all that comes behind the
attention. Both are compiled, with the launches and torch's products between them: there is no dispatcher of faces, no
graph and no check of arguments, and little of Python. Attention itself stays a call of its own: torch's fused one
chooses its backend and keeps its own state for backward.

Both give the bits of the layer as it is composed of faces, and keep the same numbers for backward; sums and statistics
of norms, of which only kernels read, are one block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mpispeed.native.cuda import launcher, ops, philox
from mpispeed.native.cuda.compiled import is_built
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import Launcher, keep
from mpispeed.native.face_kernels import VECTORS, columns
from mpispeed.native.norm_kernels import calls as norms
from mpispeed.native.pass_kernels import (
    Rows,
    drop_backward_pass,
    drop_norm_pass,
    drop_pass,
    gelu_backward_pass,
    gelu_pass,
)


def _prepare(runs: Launcher, key: tuple[Any, ...]) -> compiled.LayerPasses:
    """The launches of a layer for one size of its input; the key is that of `LayerPasses`."""
    kept = ("layer", *key)
    found: compiled.LayerPasses | None = runs.kept.get(kept)
    if found is None:
        count, hidden, inner, dtype, _, _, ratio, eps, _, _, by_place = key
        outer, wide = (Rows(runs, count // hidden, cols, dtype) for cols in (hidden, inner))
        passes = (drop_norm_pass(outer, ratio, eps, by_place), drop_pass(outer, ratio, by_place), gelu_pass(wide))
        back = columns(drop_backward_pass(outer, ratio, by_place)), columns(gelu_backward_pass(wide))
        found = keep(runs, kept, compiled.LayerPasses(runs, key, passes, back, norms))
    return found


if is_built:
    calls = compiled.LayerCalls(_prepare, launcher.for_tensor, philox.are_in_memory, VECTORS)
    calls.refuse = partial(ops.refuse_second_derivative, "a transformer layer")

    class Before(torch.autograd.Function):
        """Norm and projection to queries, keys and values.

        With norms before, it gives its input too, for the sum that goes around, so that both gradients are added in
        the pass of the norm.
        """

        forward = staticmethod(calls.before_forward)
        backward = staticmethod(calls.before_backward)

    class After(torch.autograd.Function):
        """Output of the attention, dropout, residual and norm, the MLP, and what is behind it."""

        forward = staticmethod(calls.after_forward)
        backward = staticmethod(calls.after_backward)

    before = ops.apply_of(Before)
    after = ops.apply_of(After)
    passes_for: Callable[..., compiled.LayerPasses | None] = calls.passes
else:

    def _refuse(*_: Any) -> None:
        return None

    passes_for = before = after = _refuse  # without the compiled launcher a layer is composed of faces
