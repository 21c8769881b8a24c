"""Passes of a transformer layer between its products, on the host and without gradients, one call each.

Norms with the residual sum before them, activations with the product behind them, rotary embedding in place, and the
attention of one query per sequence to cached keys. Arithmetic is fp32, and each stored value is rounded once. Sums run
in sixteen lanes and exponentials are polynomials, so bits depend neither on threads nor on the vector width. Every
function has a reference in torch, which also runs where the loops were not built; the two differ by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mpispeed.native import status
from mpispeed.native.cuda import ops
from mpispeed.native.norm import norm_reference

KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 2, "gelu": 3, "silu": 4}
"""Names of `gated`: `gelu` is the exact form."""

_HEADS_DIM = 4


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *, is_centered: bool
) -> tuple[Tensor, Tensor]:
    """Give `x + residual`, rounded, and its layer norm, or its RMS norm if not `is_centered`.

    Shapes: x and residual [..., n], weight and bias [n]. Without a residual the sum is x itself.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check(
        "add_norm", x, {"residual": (residual, x.shape), "weight": (weight, x.shape[-1:]), "bias": (bias, x.shape[-1:])}
    )
    if weight is None and bias is not None:
        msg = "add_norm: a bias without a weight"
        raise ValueError(msg)
    module = status.compiled("layer_loops")
    if module is None:
        y, total, _, _ = norm_reference(x, residual, weight, bias, eps, is_centered)
        return x if residual is None else total, y
    x = x.contiguous()
    residual, weight, bias = (t if t is None else t.contiguous() for t in (residual, weight, bias))
    y, cols = torch.empty_like(x), x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    addresses = [0 if t is None else t.data_ptr() for t in (y, total, x, residual, weight, bias)]
    module.norm(*addresses, x.numel() // max(cols, 1), cols, eps, is_centered, KINDS[x.dtype], torch.get_num_threads())
    return total, y


def gated(x: Tensor, activation: str, other: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Give f(x) * other, or f(x); the activation is not rounded in between.

    Args:
        x: of any shape.
        activation: one of `ACTIVATIONS`.
        other: of x's shape.
        out: where the result is stored, which may be x; None: new memory.

    Raises:
        ValueError: the activation is unknown, or shapes, dtypes or devices do not fit.
    """
    if activation not in ACTIVATIONS:
        msg = f"gated: activation is {activation!r}; known are {', '.join(ACTIVATIONS)}"
        raise ValueError(msg)
    _check("gated", x, {"other": (other, x.shape), "out": (out, x.shape)})
    if out is not None and not out.is_contiguous():
        msg = f"gated: out has strides {out.stride()}; expected a contiguous tensor"
        raise ValueError(msg)
    module = status.compiled("layer_loops")
    if module is None:
        made = gated_reference(x, activation, other)
        return made if out is None else out.copy_(made)
    x = x.contiguous()
    other = other if other is None else other.contiguous()
    out = torch.empty_like(x) if out is None else out
    address = 0 if other is None else other.data_ptr()
    what, threads = ACTIVATIONS[activation], torch.get_num_threads()
    module.gate(out.data_ptr(), x.data_ptr(), address, x.numel(), what, KINDS[x.dtype], threads)
    return out


def gated_reference(x: Tensor, activation: str, other: Tensor | None = None) -> Tensor:
    """As `gated`, in torch."""
    wide = x.float()
    y = {
        "none": lambda: wide,
        "relu": lambda: F.relu(wide),
        "gelu_tanh": lambda: F.gelu(wide, approximate="tanh"),
        "gelu": lambda: F.gelu(wide),
        "silu": lambda: F.silu(wide),
    }[activation]()
    return (y if other is None else y * other.float()).to(x.dtype)


def rotate_(x: Tensor, cosine: Tensor, sine: Tensor, size: int, *, is_halved: bool) -> Tensor:
    """Turn pairs of elements of every head by the angle of its position, in place.

    Shapes: x [rows, heads * size], where a row may be part of a longer one; cosine and sine [table rows, at least h],
    of which the first h columns count. Rows are those of the tables, repeated.

    Args:
        x: queries or keys, changed.
        cosine: of the angles.
        sine: goes with it.
        size: of a head; its first 2 h elements are turned.
        is_halved: i and i + h are a pair (GPT-NeoX, LLaMA), and tables have 2 h columns, of two equal halves; else 2 i
            and 2 i + 1 (GPT-J), and tables have h columns.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    half = cosine.shape[-1] // 2 if is_halved else cosine.shape[-1]
    _check("rotate_", x, {"cosine": (cosine, cosine.shape), "sine": (sine, cosine.shape)})
    rows, width = x.shape if x.dim() == 2 else (0, 0)
    table = cosine.shape[0] if cosine.dim() == 2 else 0
    if not table or rows % table or size < 1 or width % size or not 0 < 2 * half <= size or x.stride(1) != 1:
        msg = f"rotate_: x {tuple(x.shape)} with strides {x.stride()}, heads of {size}, tables {tuple(cosine.shape)}; "
        msg += "expected [rows, heads * size] and tables of a divisor of the rows, not wider than a head"
        raise ValueError(msg)
    module = status.compiled("layer_loops")
    if module is None:
        return x.copy_(rotate_reference(x, cosine, sine, size, is_halved=is_halved))
    cosine, sine = cosine.contiguous(), sine.contiguous()
    addresses = (x.data_ptr(), cosine.data_ptr(), sine.data_ptr())
    sizes = (rows, x.stride(0), width // size, size, half, table, cosine.shape[1])
    module.rotary(*addresses, *sizes, is_halved, KINDS[x.dtype], torch.get_num_threads())
    return x


def rotate_reference(x: Tensor, cosine: Tensor, sine: Tensor, size: int, *, is_halved: bool) -> Tensor:
    """As `rotate_`, in torch, not in place."""
    half = cosine.shape[1] // 2 if is_halved else cosine.shape[1]
    repeat = x.shape[0] // cosine.shape[0]
    c, s = (table[:, :half].float().repeat(repeat, 1)[:, None] for table in (cosine, sine))
    by_head = x.float().unflatten(1, (-1, size))
    turned, rest = by_head[..., : 2 * half], by_head[..., 2 * half :]
    pairs = turned.unflatten(-1, (2, half) if is_halved else (half, 2))
    a, b = pairs.unbind(-2 if is_halved else -1)
    both = torch.stack((a * c - b * s, b * c + a * s), dim=-2 if is_halved else -1)
    return torch.cat((both.flatten(-2), rest), dim=-1).flatten(1).to(x.dtype)


def takes_mask(mask: Tensor | None, k: Tensor) -> bool:
    """True if `attend` can take a mask with keys `k`: booleans or addends of one query, the same for all heads."""
    if mask is None:
        return True
    is_one = mask.dim() == _HEADS_DIM and mask.shape[0] in (1, k.shape[0]) and mask.shape[1:3] == (1, 1)
    fits = is_one and mask.shape[3] >= k.shape[2] and mask.stride(3) == 1
    return fits and mask.is_cpu and mask.dtype in (torch.bool, k.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, slopes: Tensor | None = None
) -> Tensor:
    """Attention softmax(scale * q k^T + slope * place + mask) v of one query for each sequence.

    Args:
        q: queries.
        k: keys, by any strides but that of the last dim.
        v: values, likewise.
        mask: see `takes_mask`; booleans are True where a key is seen. A query that sees none gives zeros.
        scale: of the products.
        slopes: of ALiBi, times the place of a key.

    Shapes: q [batch, heads, size], k and v [batch, key heads, keys, size], mask [batch or 1, 1, 1, at least keys],
        slopes [heads] in fp32; the result is as q.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check_heads(q, k, v, mask, slopes)
    if torch._C._len_torch_dispatch_stack():  # somebody counts or traces what is computed
        seen: Tensor = _attend.op(q, k, v, mask, scale, slopes)
        return seen
    return _run_attend(q, k, v, mask, scale, slopes)


def _run_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, slopes: Tensor | None) -> Tensor:
    module = status.compiled("layer_loops")
    if module is None:
        return attend_reference(q, k, v, mask, scale, slopes=slopes)
    q = q.contiguous()
    slopes = slopes if slopes is None else slopes.contiguous()
    out = torch.empty_like(q)
    kind, mask_at = 0, (0, 0, 0)
    if mask is not None:
        kind = 1 if mask.dtype == torch.bool else 2
        mask_at = (mask.data_ptr(), kind, mask.stride(0) if mask.shape[0] > 1 else 0)
    sizes = (q.shape[0], q.shape[1], k.shape[1], k.shape[2], q.shape[2])
    addresses = (out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), *mask_at)
    slope_at = 0 if slopes is None else slopes.data_ptr()
    strides = (k.stride()[:3], v.stride()[:3])
    module.attend(*addresses, slope_at, sizes, *strides, scale, KINDS[q.dtype], torch.get_num_threads())
    return out


_attend = ops.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, Tensor? slopes) -> Tensor",
    _run_attend,
    lambda q, k, v, mask, scale, slopes: q.new_empty(q.shape),
)


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, slopes: Tensor | None = None
) -> Tensor:
    """As `attend`, in torch."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = (keys @ q.float().unsqueeze(-1)).squeeze(-1) * scale
    if slopes is not None:
        scores = scores + slopes[:, None] * torch.arange(k.shape[2])
    if mask is not None:
        row = mask[:, :, 0, : k.shape[2]]
        scores = scores.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else scores + row.float()
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return (weights.unsqueeze(-2) @ values).squeeze(-2).to(q.dtype)


# -- checks ----------------------------------------------------------------------------------------------------------


def _check(where: str, x: Tensor, others: dict[str, tuple[Tensor | None, torch.Size]]) -> None:
    if x.dtype not in KINDS or not x.is_cpu:
        msg = f"{where}: x is {x.dtype} on {x.device}; expected fp32, bf16 or fp16 on the host"
        raise ValueError(msg)
    for name, (tensor, shape) in others.items():
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype or not tensor.is_cpu):
            msg = f"{where}: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
            msg += f"expected {x.dtype} {tuple(shape)} on the host"
            raise ValueError(msg)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None) -> None:
    alike = q.dtype == k.dtype == v.dtype and q.dtype in KINDS and q.is_cpu and k.is_cpu and v.is_cpu
    shapes = q.dim() == 3 and k.dim() == _HEADS_DIM and k.shape == v.shape and k.shape[0] == q.shape[0]
    if not alike or not shapes or q.shape[2] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        told = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        msg = f"attend of {told}; expected one dtype, [batch, heads, size] and [batch, key heads, keys, size] on the "
        msg += "host, with key heads that divide the heads"
        raise ValueError(msg)
    if k.stride(3) != 1 or v.stride(3) != 1:
        msg = f"attend: strides of k are {k.stride()}, of v {v.stride()}; the last has to be 1"
        raise ValueError(msg)
    if mask is not None and not takes_mask(mask, k):
        msg = f"attend: mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}; expected booleans or {q.dtype} "
        msg += f"[{q.shape[0]} or 1, 1, 1, at least {k.shape[2]}] on the host"
        raise ValueError(msg)
    if slopes is not None and (slopes.shape != q.shape[1:2] or slopes.dtype != torch.float32 or not slopes.is_cpu):
        msg = f"attend: slopes are {slopes.dtype} {tuple(slopes.shape)}; expected fp32 [{q.shape[1]}] on the host"
        raise ValueError(msg)
