"""A transformer layer as two functions of autograd around the attention, for eager mode on kernels.

The first is the norm in front and the projection to queries, keys and values, the second all that comes behind the
attention. Between their launches there is no dispatcher, no graph and no check of arguments. Attention itself stays a
call of its own: torch's fused one chooses its backend and keeps its own state for backward.

Both give the bits of the layer as it is composed of faces, and keep the same tensors for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpispeed.native.columns import vector
from mpispeed.native.cuda import launcher, ops, philox
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import is_built
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import Launcher, Prepared, keep
from mpispeed.native.norm_kernels import calls
from mpispeed.native.pass_kernels import (
    ColumnPass,
    Rows,
    drop_backward_pass,
    drop_norm_pass,
    drop_pass,
    gelu_backward_pass,
    gelu_pass,
)

_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Passes:
    """Launches of one layer for one size of its input.

    Attributes:
        runs: where they go.
        heads: of the attention.
        ratio: of the dropouts behind attention and MLP; 0 outside of training.
        eps: of the norms.
        is_pre: norms stand before attention and MLP.
        keeps_gelu: the GELU is kept for backward, not computed again.
        by_place: kernels read seeds of dropouts from memory.
        drop_norm: dropout, residual and norm, behind the attention and, with norms behind, the MLP.
        drop: dropout and residual behind the MLP, with norms before.
        drop_back: the gradient of a dropout.
        gelu: bias and GELU.
        gelu_back: its gradient.
    """

    runs: Launcher
    heads: int
    ratio: float
    eps: float
    is_pre: bool
    keeps_gelu: bool
    by_place: bool
    drop_norm: Prepared
    drop: Prepared
    drop_back: ColumnPass
    gelu: Prepared
    gelu_back: ColumnPass


def passes_for(
    x: Tensor, parameters: tuple[Tensor, ...], inner: int, heads: int, ratio: float, eps: float, *, is_pre: bool,
    keeps_gelu: bool,
) -> Passes | None:  # fmt: skip
    """The launches for this input; None if the layer has to be composed of faces.

    That is where no kernels run, where something traces the call or autocast chooses dtypes, and for tensors of several
    dtypes, of gaps, or of rows that are no whole, aligned 16 bytes.
    """
    if not is_built or not ops.is_eager(x, *parameters) or torch._C._is_any_autocast_enabled():
        return None
    dtype, hidden, count = x.dtype, x.shape[2], x.numel()
    if (
        dtype not in TAGS
        or not count
        or not compiled.are_alike(x, *parameters)
        or not compiled.are_aligned(x, *parameters)
    ):
        return None
    rows, width = count // hidden, vector(dtype)
    runs = launcher.for_tensor(x)
    if runs is None or hidden % width or inner % width or rows > _MOST_ROWS:
        return None
    by_place = ratio > 0 and philox.are_in_memory(x)
    key = ("layer", rows, hidden, inner, heads, dtype, ratio, eps, is_pre, keeps_gelu, by_place)
    found: Passes | None = runs.kept.get(key)
    if found is None:
        outer, wide = Rows(runs, rows, hidden, dtype), Rows(runs, rows, inner, dtype)
        drop = (drop_pass(outer, ratio, by_place), drop_backward_pass(outer, ratio, by_place))
        made = (drop_norm_pass(outer, ratio, eps, by_place), *drop, gelu_pass(wide), gelu_backward_pass(wide))
        found = keep(runs, key, Passes(runs, heads, ratio, eps, is_pre, keeps_gelu, by_place, *made))
    return found


class Before(torch.autograd.Function):
    """Norm and projection to queries, keys and values.

    With norms before, it gives its input too, for the sum that goes around, so that both gradients are added in the
    pass of the norm.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_w: Tensor, norm_b: Tensor, weight: Tensor, bias: Tensor | None, passes: Passes
    ) -> Any:
        """With norms before x itself; then q, k, v by heads, with a bias; without one the projection as it is."""
        ctx.passes, ctx.is_split = passes, bias is not None
        ctx.set_materialize_grads(False)
        n, stats = x, None
        if passes.is_pre:
            n, _, stats = calls.forward(passes.runs, x, None, norm_w, norm_b, passes.eps, True)
        qkv = F.linear(n, weight, bias)
        ctx.save_for_backward(x, n if passes.is_pre else None, weight, norm_w if passes.is_pre else None, stats)
        around = (x,) if passes.is_pre else ()
        if bias is None:
            return (*around, qkv) if around else qkv
        batch, length, hidden = x.shape
        by_head = qkv.view(batch, length, 3, passes.heads, hidden // passes.heads)
        return (*around, *by_head.permute(2, 0, 3, 1, 4).unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients of the arguments."""
        if torch.is_grad_enabled():
            ops.refuse_second_derivative("a transformer layer", ctx, grads)
        passes: Passes = ctx.passes
        x, n, weight, norm_w, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad
        daround, parts = (grads[0], grads[1:]) if passes.is_pre else (None, grads)
        given = next((part for part in parts if part is not None), None)
        if given is None:
            return daround, None, None, None, None, None
        hidden = x.shape[2]
        flat = (_joined(given, parts) if ctx.is_split else given).reshape(-1, 3 * hidden)
        dweight = torch.mm(flat.t(), (x if n is None else n).view(-1, hidden)) if needs[3] else None
        dbias = flat.sum(0) if needs[4] else None
        if n is None:
            return torch.mm(flat, weight).view(x.shape) if needs[0] else None, None, None, dweight, dbias, None
        dx, dnorm_w, dnorm_b = calls.backward(
            passes.runs, torch.mm(flat, weight).view(x.shape), daround, x, norm_w, stats, True, needs[1], needs[2]
        )
        return dx if needs[0] else None, dnorm_w, dnorm_b, dweight, dbias, None


def _joined(given: Tensor, parts: tuple[Tensor | None, ...]) -> Tensor:
    """Gradients of q, k and v as one of the projection. Shapes: [batch, heads, sequence, size] each, as `given`."""
    whole = [(torch.zeros_like(given) if part is None else part).transpose(1, 2) for part in parts]
    return torch.stack(whole, dim=2)


class After(torch.autograd.Function):
    """Output of the attention, dropout, residual and norm, the MLP, and what is behind it."""

    @staticmethod
    def forward(
        ctx: Any, context: Tensor, residual: Tensor, ow: Tensor, ob: Tensor, attn_nw: Tensor, attn_nb: Tensor,
        inter_w: Tensor, inter_b: Tensor, output_w: Tensor, output_b: Tensor, norm_w: Tensor, norm_b: Tensor,
        passes: Passes, scale: float,
    ) -> Tensor:  # fmt: skip
        """The layer's output; `scale` is the factor of both branches.

        Shapes: context [batch, heads, sequence, size], residual [batch, sequence, hidden].
        """
        ctx.passes, ctx.scale = passes, scale
        ctx.set_materialize_grads(False)
        flat = context.transpose(1, 2).reshape(-1, residual.shape[2])
        seed = _seed(passes, residual)
        total, f, stats = _drop_and_norm(
            passes, *_scaled(F.linear(flat, ow), ob, scale), residual, attn_nw, attn_nb, seed
        )
        inner = F.linear(f, inter_w)
        g = torch.empty_like(inner)
        passes.gelu(g, inner, inter_b)
        out, out_bias = _scaled(F.linear(g, output_w), output_b, scale)
        ctx.seeds = seed, _seed(passes, residual)
        kept = (flat, total, stats, f, inner, g if passes.keeps_gelu else None, ow, attn_nw, inter_w, inter_b, output_w)
        if passes.is_pre:
            y = torch.empty_like(residual)
            _launch(passes, passes.drop, ctx.seeds[1], y, out, out_bias, total)
            ctx.save_for_backward(*kept)
            return y
        last, y, last_stats = _drop_and_norm(passes, out, out_bias, f, norm_w, norm_b, ctx.seeds[1])
        ctx.save_for_backward(*kept, last, last_stats, norm_w)
        return y.view(residual.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        """Gradients of the arguments."""
        if dy is None:
            return (None,) * 14
        if torch.is_grad_enabled():
            ops.refuse_second_derivative("a transformer layer", ctx, (dy,))
        passes: Passes = ctx.passes
        needs = ctx.needs_input_grad
        flat, total, stats, f, inner, g, ow, attn_nw, inter_w, inter_b, output_w, *last = ctx.saved_tensors
        shape = dy.shape
        dy = dy.reshape(total.shape)
        if dy.data_ptr() % 16 or not dy.is_contiguous():
            dy = dy.clone(memory_format=torch.contiguous_format)
        dnorm_w = dnorm_b = None
        if last:
            dy, dnorm_w, dnorm_b = calls.backward(passes.runs, dy, None, last[0], last[2], last[1], True, *needs[10:12])
        dproduct, doutput_b = _drop_back(passes, dy, ctx.seeds[1], ctx.scale)
        if g is None:
            g = torch.empty_like(inner)
            passes.gelu(g, inner, inter_b)
        doutput_w = torch.mm(dproduct.t(), g) if needs[8] else None
        del g
        dg = torch.mm(dproduct, output_w)
        dinner, dinter_b = torch.empty_like(inner), torch.empty_like(inter_b)
        passes.gelu_back.run(dinner, dinter_b, dg, inner, inter_b)
        dinter_w = torch.mm(dinner.t(), f) if needs[6] else None
        df = torch.mm(dinner, inter_w)
        around = dy if passes.is_pre else None
        if around is None:
            df += dy
        dtotal, dattn_nw, dattn_nb = calls.backward(passes.runs, df, around, total, attn_nw, stats, True, *needs[4:6])
        da, dob = _drop_back(passes, dtotal, ctx.seeds[0], ctx.scale)
        dow = torch.mm(da.t(), flat) if needs[2] else None
        batch, length, hidden = shape
        dcontext = torch.mm(da, ow).view(batch, length, passes.heads, hidden // passes.heads).transpose(1, 2)
        first = (dcontext, dtotal.view(shape), dow, dob, dattn_nw, dattn_nb)
        return *first, dinter_w, dinter_b, doutput_w, doutput_b, dnorm_w, dnorm_b, None, None


def _seed(passes: Passes, x: Tensor) -> Tensor | None:
    return philox.draw_seed(x) if passes.ratio else None


def _launch(passes: Passes, launch: Prepared, seed: Tensor | None, *pointers: Tensor | int | None) -> None:
    if seed is None:
        launch(*pointers)
    else:
        launch.seeded(philox.word(seed, passes.by_place), *pointers)


def _drop_and_norm(
    passes: Passes, x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum residual + dropout(x + x_bias), its norm, and means before reciprocal deviations.

    Shapes: x, sum and norm [rows, n].
    """
    total, y = torch.empty_like(x), torch.empty_like(x)
    rows = x.shape[0]
    stats = torch.empty(2 * rows, dtype=torch.float32, device=x.device)
    mean = stats.data_ptr()
    _launch(passes, passes.drop_norm, seed, y, total, mean, mean + 4 * rows, x, x_bias, residual, weight, bias)
    return total, y, stats


def _scaled(product: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output of a branch, in place, and its bias times `scale`."""
    return (product, bias) if scale == 1.0 else (product.mul_(scale), bias * scale)


def _drop_back(passes: Passes, dy: Tensor, seed: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of a branch that was scaled and dropped from, and of its bias; without both the first is dy."""
    dx = None if seed is None else torch.empty_like(dy)
    dbias = torch.empty(dy.shape[1], dtype=dy.dtype, device=dy.device)
    word = None if seed is None else philox.word(seed, passes.by_place)
    passes.drop_back.run(dx, dbias, dy, seed=word)
    if scale == 1.0:
        return dy if dx is None else dx, dbias
    return dy * scale if dx is None else dx.mul_(scale), dbias * scale


before = ops.apply_of(Before)
after = ops.apply_of(After)
