"""Bias with GELU, dropout or norm by kernels at once, as functions of autograd that are compiled.

Faces ask here first. Tensors that kernels do not take as they are, seeds that are given, and calls that something
traces get None, and the face goes through its operator.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mpispeed.native.columns import vector
from mpispeed.native.cuda import ops, philox
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import is_built
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import Launcher, Prepared, for_tensor, keep
from mpispeed.native.norm_kernels import calls as norms
from mpispeed.native.pass_kernels import (
    ColumnPass,
    Rows,
    drop_backward_pass,
    drop_norm_pass,
    drop_pass,
    gelu_backward_pass,
    gelu_pass,
)

VECTORS = {dtype: vector(dtype) for dtype in TAGS}
"""Elements in 16 bytes, of the dtypes that kernels take."""


def columns(made: ColumnPass) -> compiled.Columns:
    """The pass as compiled callers run it."""
    return compiled.Columns(made.launch, made.add_up, made.parts)


def _prepare(runs: Launcher, key: tuple[Any, ...]) -> compiled.FacePasses:
    """The launches of a face for one size: kind, elements, columns, dtype, device, form, and seeds are in memory."""
    kept = ("face", *key)
    found: compiled.FacePasses | None = runs.kept.get(kept)
    if found is None:
        kind, count, cols, dtype, _, form, by_place = key
        rows = Rows(runs, count // cols, cols, dtype)
        forward: Prepared
        if kind == "gelu":
            forward, back = gelu_pass(rows, form), gelu_backward_pass(rows, form)
        elif kind == "drop":
            forward, back = drop_pass(rows, form, by_place), drop_backward_pass(rows, form, by_place)
        else:
            ratio, eps = form
            forward, back = drop_norm_pass(rows, ratio, eps, by_place), drop_backward_pass(rows, ratio, by_place)
        found = keep(runs, kept, compiled.FacePasses(runs, key, forward, columns(back)))
    return found


faces: compiled.FaceCalls | None = None
"""Faces by kernels; None where the launcher was not built."""

if is_built:
    _made = compiled.FaceCalls(_prepare, for_tensor, philox.are_in_memory, VECTORS, norms)
    _made.refuse = partial(ops.refuse_second_derivative, "a function of mpispeed.kernels")

    class _Gelu(torch.autograd.Function):
        forward = staticmethod(_made.gelu_forward)
        backward = staticmethod(_made.gelu_backward)

    class _Drop(torch.autograd.Function):
        forward = staticmethod(_made.drop_forward)
        backward = staticmethod(_made.drop_backward)

    class _DropNorm(torch.autograd.Function):
        forward = staticmethod(_made.drop_norm_forward)
        backward = staticmethod(_made.drop_norm_backward)

    class _Softmax(torch.autograd.Function):
        forward = staticmethod(_made.softmax_forward)
        backward = staticmethod(_made.softmax_backward)

    _made.apply_softmax = ops.apply_of(_Softmax)
    _made.apply_gelu, _made.apply_drop, _made.apply_drop_norm = (ops.apply_of(f) for f in (_Gelu, _Drop, _DropNorm))
    faces = _made
