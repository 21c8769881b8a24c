"""Projection to queries, keys and values: bias, split into heads and rotary embedding in one pass.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. Arithmetic is fp32 (fp64 for
fp64), each stored value is rounded once; the gradient of the bias is a sum in a fixed order.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import torch
from torch import Tensor

from mpispeed.native.columns import inner_dtype, tile, vector
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.cuda.launcher import keep
from mpispeed.native.flat import divisor
from mpispeed.native.norm_kernels import prepare_add_up

_AT_ONCE = 3  # blocks on a multiprocessor, by the launch bounds of the kernels

Style = Literal["half", "interleaved"]
"""Which elements of a head are a pair: i and i + rotary_dim / 2 (GPT-NeoX, LLaMA), or 2 i and 2 i + 1 (GPT-J)."""


def rotary_tables(
    sequence: int, rotary_dim: int, base: float = 10000.0, *, first: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * base^(-2 i / rotary_dim), for positions from `first` on.

    Shapes: two fp32 [sequence, rotary_dim / 2].

    Raises:
        ValueError: `rotary_dim` is odd.
    """
    if rotary_dim % 2:
        msg = f"rotary_tables: rotary_dim is {rotary_dim}; expected an even number, since pairs are turned"
        raise ValueError(msg)
    # In fp64, because an fp32 angle of position 100,000 is off by 0.004.
    places = -torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    rates = base ** (places / divisor(rotary_dim, places))
    angles = torch.arange(first, first + sequence, dtype=torch.float64, device=device)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


def split_qkv(
    qkv: Tensor, bias: Tensor | None, heads: int, *, key_heads: int | None = None, cosine: Tensor | None = None,
    sine: Tensor | None = None, style: Style = "half",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values by heads, out of the rows [all q | all k | all v] of a projection.

    Shapes: qkv [batch, sequence, (heads + 2 key_heads) * size], bias of its last dim; cosine and sine
    [sequence, rotary_dim / 2]. Results are contiguous: q [batch, heads, sequence, size], k and v with `key_heads`.

    Args:
        qkv: the projection, without bias.
        bias: is added first.
        heads: of the queries.
        key_heads: of keys and values, each for several query heads; None: as many as heads.
        cosine: turns the first rotary_dim elements of each q and k by the angle of its position; no gradient.
        sine: goes with `cosine`.
        style: which elements are a pair.

    Raises:
        ValueError: shapes or dtypes do not fit. Within `torch.autocast` the bias comes in qkv's dtype.
    """
    key_heads = heads if key_heads is None else key_heads
    _check(qkv, bias, heads, key_heads)
    if style not in ("half", "interleaved"):
        msg = f'split_qkv: style is {style!r}; expected "half" or "interleaved"'
        raise ValueError(msg)
    if (cosine is None) != (sine is None):
        msg = "split_qkv: only one of cosine and sine is given; expected both or none"
        raise ValueError(msg)
    if cosine is not None and sine is not None:
        _check_tables(qkv, cosine, sine, qkv.shape[-1] // (heads + 2 * key_heads))
        inner = inner_dtype(qkv.dtype)
        cosine, sine = cosine.to(inner), sine.to(inner)
    q, k, v = _split(qkv, bias, cosine, sine, heads, key_heads, style == "half")
    return q, k, v


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, sequence, size] to [batch, sequence, heads * size]: a plain copy of torch."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _check(qkv: Tensor, bias: Tensor | None, heads: int, key_heads: int) -> None:
    parts = heads + 2 * key_heads
    if heads < 1 or key_heads < 1 or heads % key_heads:
        msg = f"split_qkv: {heads} heads and {key_heads} key heads; expected the second to divide the first"
        raise ValueError(msg)
    if qkv.dim() != 3 or not qkv.is_floating_point() or qkv.shape[-1] == 0 or qkv.shape[-1] % parts:
        msg = (
            f"split_qkv: qkv is {qkv.dtype} of shape {tuple(qkv.shape)}; expected floating point [batch, sequence, "
            f"n * {parts}], for {heads} heads and {key_heads} key heads"
        )
        raise ValueError(msg)
    if bias is not None and bias.shape != qkv.shape[-1:]:
        msg = f"split_qkv: bias is {tuple(bias.shape)}; expected {tuple(qkv.shape[-1:])}, the last dim of qkv"
        raise ValueError(msg)
    ops.check_one_dtype("split_qkv", qkv, bias=bias)


def _check_tables(qkv: Tensor, cosine: Tensor, sine: Tensor, size: int) -> None:
    fits = cosine.dim() == 2 and cosine.shape == sine.shape and cosine.shape[0] == qkv.shape[1]
    if not fits or not 0 < 2 * cosine.shape[1] <= size:
        msg = (
            f"split_qkv: cosine is {tuple(cosine.shape)} and sine {tuple(sine.shape)}; expected two "
            f"[{qkv.shape[1]}, rotary_dim / 2], with rotary_dim at most {size}"
        )
        raise ValueError(msg)
    if cosine.device != qkv.device or sine.device != qkv.device:
        msg = f"split_qkv: cosine is on {cosine.device}, sine on {sine.device}, qkv on {qkv.device}; move the tables"
        raise ValueError(msg)


# ---- references
# -----------------------------------------------------------------------------------------------------------
def split_reference(
    qkv: Tensor, bias: Tensor | None, cosine: Tensor | None, sine: Tensor | None, heads: int, key_heads: int,
    is_halved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values in torch."""
    z = qkv.to(inner_dtype(qkv.dtype))
    z = z if bias is None else z + bias.to(z.dtype)
    by_head = z.unflatten(-1, (heads + 2 * key_heads, -1)).transpose(1, 2)
    q, k, v = by_head.split([heads, key_heads, key_heads], dim=1)
    if cosine is not None and sine is not None:
        q, k = _turned(q, cosine, sine, is_halved), _turned(k, cosine, sine, is_halved)
    first, second, third = (part.to(qkv.dtype, copy=True, memory_format=torch.contiguous_format) for part in (q, k, v))
    return first, second, third


def merge_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor | None, sine: Tensor | None, is_halved: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the projection and of the bias in torch; the second is their sum before it is rounded."""
    parts = [part.to(inner_dtype(dq.dtype)) for part in (dq, dk, dv)]
    if cosine is not None and sine is not None:
        parts[:2] = (_turned(part, cosine, -sine, is_halved) for part in parts[:2])
    whole = torch.cat(parts, dim=1).transpose(1, 2).flatten(2)
    return whole.to(dq.dtype, copy=True, memory_format=torch.contiguous_format), whole.sum((0, 1)).to(dq.dtype)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, is_halved: bool) -> Tensor:
    half = cosine.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (2, half) if is_halved else (half, 2))
    a, b = pairs.unbind(-2 if is_halved else -1)
    both = torch.stack((a * cosine + -b * sine, b * cosine + a * sine), dim=-2 if is_halved else -1)
    return torch.cat((both.flatten(-2), rest), dim=-1)


# ---- launches --------------------------------------------------------------------------------------------------------
def _fits_wide(dtype: torch.dtype, cols: int, size: int, rotated: int, is_halved: bool) -> bool:
    width = vector(dtype)
    return cols % width == 0 and size % width == 0 and rotated % (2 * width if is_halved else width) == 0


def _terms(rows: int, sequence: int, heads: int, key_heads: int, size: int, rotated: int, *flags: bool) -> bytes:
    cols = (heads + 2 * key_heads) * size
    return struct.pack("QIIIIIIii", rows, sequence, cols, heads, key_heads, size, rotated, *flags)


def _run(
    qkv: Tensor, bias: Tensor | None, cosine: Tensor | None, sine: Tensor | None, heads: int, key_heads: int,
    is_halved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, cols = qkv.shape[0] * qkv.shape[1], qkv.shape[2]
    runs = launcher.for_tensor(qkv) if qkv.dtype in TAGS and max(rows, cols) < 2**31 else None
    if runs is None:
        return split_reference(qkv, bias, cosine, sine, heads, key_heads, is_halved)
    qkv = qkv.contiguous()
    bias, cosine, sine = (t if t is None else t.contiguous() for t in (bias, cosine, sine))
    q, k, v = _fake(qkv, bias, cosine, sine, heads, key_heads, is_halved)
    if rows:
        size, rotated = q.shape[-1], 0 if cosine is None else 2 * cosine.shape[1]
        aligned = compiled.are_aligned(qkv, bias, cosine, sine)
        key = ("split", qkv.dtype, rows, qkv.shape[1], heads, key_heads, size, rotated, is_halved, aligned)
        launch = runs.kept.get(key)
        if launch is None:
            wide = aligned and _fits_wide(qkv.dtype, cols, size, rotated, is_halved)
            grid, block = tile(runs, rows, cols, vector(qkv.dtype) if wide else 1, _AT_ONCE)
            terms = _terms(rows, qkv.shape[1], heads, key_heads, size, rotated, is_halved, wide)
            launch = keep(runs, key, runs.prepare(f"split_qkv_{TAGS[qkv.dtype]}", grid, block, terms))
        launch(q, k, v, qkv, bias, cosine, sine)
    return q, k, v


def _fake(
    qkv: Tensor, bias: Tensor | None, cosine: Tensor | None, sine: Tensor | None, heads: int, key_heads: int,
    is_halved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, sequence, cols = qkv.shape
    size = cols // (heads + 2 * key_heads)
    q, k, v = (qkv.new_empty(batch, count, sequence, size) for count in (heads, key_heads, key_heads))
    return q, k, v


def _run_merge(
    dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor | None, sine: Tensor | None, is_halved: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    (batch, heads, sequence, size), key_heads = dq.shape, dk.shape[1]
    rows, cols = batch * sequence, (heads + 2 * key_heads) * size
    runs = launcher.for_tensor(dq) if dq.dtype in TAGS and max(rows, cols) < 2**31 else None
    if runs is None:
        whole, dbias = merge_reference(dq, dk, dv, cosine, sine, is_halved)
        return whole, dbias if with_bias else dq.new_empty(0)
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    cosine, sine = (t if t is None else t.contiguous() for t in (cosine, sine))
    whole, dbias = _fake_merge(dq, dk, dv, cosine, sine, is_halved, with_bias)
    if not rows:
        return whole, dbias.zero_()
    rotated = 0 if cosine is None else 2 * cosine.shape[1]
    aligned = compiled.are_aligned(dq, dk, dv, cosine, sine)
    key = ("merge", dq.dtype, rows, sequence, heads, key_heads, size, rotated, is_halved, aligned, with_bias)
    found = runs.kept.get(key)
    if found is None:
        wide = aligned and _fits_wide(dq.dtype, cols, size, rotated, is_halved)
        width = vector(dq.dtype) if wide else 1
        grid, block = tile(runs, rows, cols, width, _AT_ONCE)
        terms = _terms(rows, sequence, heads, key_heads, size, rotated, is_halved, wide)
        shared = block[0] * block[1] * width * 4 if with_bias else 0
        launch = runs.prepare(f"merge_qkv_{TAGS[dq.dtype]}", grid, block, terms, shared)
        found = keep(runs, key, (launch, prepare_add_up(runs, dq.dtype, grid[1], cols, 1), grid[1] * cols))
    launch, add_up, parts = found
    partial = torch.empty(parts, dtype=torch.float32, device=dq.device) if with_bias else None
    launch(whole, partial, dq, dk, dv, cosine, sine)
    if with_bias:
        add_up(dbias, None, partial)
    return whole, dbias


def _fake_merge(
    dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor | None, sine: Tensor | None, is_halved: bool, with_bias: bool
) -> tuple[Tensor, Tensor]:
    (batch, heads, sequence, size), key_heads = dq.shape, dk.shape[1]
    cols = (heads + 2 * key_heads) * size
    return dq.new_empty(batch, sequence, cols), dq.new_empty(cols if with_bias else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cosine, sine, _, _, ctx.is_halved = inputs
    ctx.save_for_backward(cosine, sine)
    ctx.shapes = [part.shape for part in output]


def _grads(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    given = next((grad for grad in grads if grad is not None), None)
    if given is None:
        return (None,) * 7
    parts = [given.new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.shapes, strict=True)]
    with_bias = ctx.needs_input_grad[1]
    whole, dbias = _merge(*parts, *ctx.saved_tensors, ctx.is_halved, with_bias)
    return whole, dbias if with_bias else None, None, None, None, None, None


_split = ops.define(
    "split_qkv(Tensor qkv, Tensor? bias, Tensor? cosine, Tensor? sine, int heads, int key_heads, bool is_halved)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    autocast=("qkv",),
    follow=("bias",),
)
_merge = ops.define(
    "merge_qkv(Tensor dq, Tensor dk, Tensor dv, Tensor? cosine, Tensor? sine, bool is_halved, bool with_bias)"
    " -> (Tensor, Tensor)",
    _run_merge,
    _fake_merge,
)
ops.differentiate(_split, _save, _grads)
