"""Attention of one piece with its log-sum-exp, by the best kernel of the device; exact merge of two pieces.

On CPU torch's flash kernel, on CUDA its flash kernel (16 bit) or its memory-efficient one (fp32, masks), elsewhere and
as a twin for tests plain torch. Backward takes the output and log-sum-exp of *all* pieces of a row, and gives what
this piece adds to the gradients.

Source: Dao, "FlashAttention-2", 2023 (the backward from out and log-sum-exp); Liu et al., "Ring Attention with
Blockwise Transformers", 2023 (pieces merged).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

_ATEN = torch.ops.aten


def partial(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of `q` to `k` and `v` alone.

    Args:
        q: [B, h, S, d].
        k: [B, h_kv, S_k, d]; h is a multiple of h_kv.
        v: as `k`.
        is_causal: query i sees the keys 0..i; S equals S_k then.
        scale: of the scores; None: 1 / sqrt(d).
        mask: added to the scores, broadcast to [B, h, S, S_k], -inf hides a key; dtype of `q` or fp32.

    Returns:
        The output [B, h, S, d] in q's dtype, and the log-sum-exp of the scores [B, h, S] in fp32 (fp64 for fp64). A
        row without a key has output 0 and log-sum-exp -inf.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype))
    kernel = _KERNELS[_name(q, mask)][0]
    out, lse = kernel(_dense(q), _dense(k), _dense(v), is_causal, scale, mask)
    if mask is not None:
        # the kernels of torch call the log-sum-exp of a row without a key 0; on CPU its output is 0 already
        is_empty = (mask == -torch.inf).all(-1)
        lse = lse.masked_fill(is_empty, -torch.inf)
        out = out if q.device.type == "cpu" else out.masked_fill(is_empty.unsqueeze(-1), 0.0)
    return out, lse


def partial_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one piece adds to the gradients of q, k, v.

    Args:
        grad: gradient of the output of all pieces, [B, h, S, d].
        q: as in `partial`.
        k: as in `partial`.
        v: as in `partial`.
        out: output of all pieces of these queries, in q's dtype.
        lse: log-sum-exp of all pieces of these queries.
        is_causal: as in `partial`.
        scale: as in `partial`.
        mask: as in `partial`; it gets no gradient.

    Returns:
        dq, dk, dv, in the shapes and dtypes of q, k, v.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # exp(-inf - -inf) would be no number where a row has no key at all; exp(-inf - 0) is the 0 it has to be
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    kernel = _KERNELS[_name(q, mask)][1]
    return kernel(_dense(grad), _dense(q), _dense(k), _dense(v), _dense(out), lse, is_causal, scale, mask)


def merge(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> None:
    """Merges attention to other keys into `out` and `lse`, in place and exactly.

    Args:
        out: [B, h, S, d], an accumulator (fp32 where the inputs have 16 bits: see `wide`).
        lse: [B, h, S]; -inf where nothing was merged yet.
        out2: the other output, any floating dtype.
        lse2: its log-sum-exp.
    """
    weight = torch.sigmoid(lse2 - lse).nan_to_num_(0.0)  # -inf - -inf: neither has a key
    out.lerp_(out2.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, lse2, out=lse)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are made in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _dense(x: Tensor) -> Tensor:
    """The kernels read rows of d neighbours that do not overlap (an expanded gradient's do), whatever else."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _name(q: Tensor, mask: Tensor | None) -> str:
    """The kernel for these tensors."""
    if q.device.type == "cpu":
        return "cpu"
    if q.is_meta:
        return "shapes"
    if q.device.type == "cuda" and q.dtype != torch.float64 and torch.version.cuda:
        is_flash = mask is None and q.dtype != torch.float32 and q.shape[-1] <= 256
        if is_flash and torch.cuda.get_device_capability(q.device)[0] >= 8:
            return "flash"
        return "efficient"
    return "math"


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values once for each head of the queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Gradients of repeated keys or values, of one group of heads together."""
    if x.shape[1] == heads:
        return x
    return x.unflatten(1, (heads, -1)).sum(2, dtype=wide(x.dtype)).to(x.dtype)


# --- CPU: torch's flash kernel --------------------------------------------------------------------------------------


@functools.cache
def _is_grouped_on_cpu() -> bool:
    """Whether the kernel of this torch takes fewer heads of keys by itself; found out by trying, once."""
    q, k = torch.arange(8.0).view(1, 4, 1, 2), torch.arange(8.0).view(1, 2, 2, 2)
    try:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False)
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(q, q, k, k, out, lse, 0.0, False)
    except RuntimeError:
        return False
    expected = _math(q, k, k, False, 0.5**0.5, None)[0]
    return torch.allclose(out, expected) and found[1].shape == k.shape


def _cpu_mask(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """The kernel wants two or four dims, and fp32 or q's dtype."""
    if mask is None:
        return None
    mask = mask if mask.dtype == torch.float32 and q.dtype != torch.float64 else mask.to(q.dtype)
    return mask if mask.dim() in (2, 4) else mask.expand(*(1,) * (4 - mask.dim()), *mask.shape)


def _cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _is_grouped_on_cpu():
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    mask = _cpu_mask(q, mask)
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    if not _is_grouped_on_cpu():
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=_cpu_mask(q, mask), scale=scale
    )
    return dq, _summed(dk, heads), _summed(dv, heads)


# --- CUDA: flash (fp16, bf16) and memory-efficient kernels ----------------------------------------------------------


def _padded(x: Tensor, multiple: int = 8) -> Tensor:
    """Zeros behind the last dim up to what the kernels of CUDA load at once; they change neither scores nor sums."""
    return functional.pad(x, (0, -x.shape[-1] % multiple))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    width = q.shape[-1]
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    found = _ATEN._scaled_dot_product_flash_attention(
        _padded(q), _padded(k), _padded(v), 0.0, is_causal, False, scale=scale
    )
    return found[0][..., :width], found[1]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width, heads = q.shape[-1], k.shape[1]
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # the state of dropout, which is 0
    tensors = [_padded(x) for x in (grad, q, k, v, out)]
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
        *tensors, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused, unused, scale=scale
    )
    return dq[..., :width], _summed(dk[..., :width], heads), _summed(dv[..., :width], heads)


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask of all pairs, in a buffer whose rows start at multiples of 16 elements, as torch's own attention does.

    The kernel reads rows of neighbours from such starts; other dims may be expanded.
    """
    if mask is None:
        return None
    length = k.shape[2]
    room = torch.zeros((*mask.shape[:-1], length + -length % 16), dtype=q.dtype, device=q.device)
    room[..., :length] = mask
    return room[..., :length].expand(*q.shape[:3], length)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if mask is not None and q.dtype != torch.float32:
        # backward in 16 bits gave a wrong dq, or read memory not its own, on an H200 (torch 2.11): the layout of the
        # output, see `_efficient_backward`; this way in fp32 is the one that has been seen to be right there since
        out, lse = _efficient(q.float(), k.float(), v.float(), is_causal, scale, mask)
        return out.to(q.dtype), lse
    width, length = q.shape[-1], q.shape[2]
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    found = _ATEN._scaled_dot_product_efficient_attention(
        _padded(q), _padded(k), _padded(v), _bias(q, k, mask), True, 0.0, is_causal, scale=scale
    )
    return found[0][..., :width], found[1][..., :length]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if mask is not None and q.dtype != torch.float32:  # as in `_efficient`
        dq, dk, dv = _efficient_backward(
            grad.float(), q.float(), k.float(), v.float(), out.float(), lse, is_causal, scale, mask
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    width, heads = q.shape[-1], k.shape[1]
    bias = _bias(q, k, mask)
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout, which is 0
    lse = functional.pad(lse.contiguous(), (0, -lse.shape[-1] % 32), value=torch.inf)
    # in 16 bits the kernel reads the output itself and takes its tokens to be [heads, d] apart, whatever the strides
    out = _padded(out).transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        *[_padded(x) for x in (grad, q, k, v)],
        bias,
        out,
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return dq[..., :width], _summed(dk[..., :width], heads), _summed(dv[..., :width], heads)


# --- any device: plain torch ----------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _math(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = (x.to(wide(dtype)) for x in (q, _repeated(k, heads), _repeated(v, heads)))
    scores = _scores(q, k, is_causal, scale, mask)
    lse = scores.logsumexp(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return ((scores - finite.unsqueeze(-1)).exp() @ v).to(dtype), lse


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, heads, groups = q.dtype, q.shape[1], k.shape[1]
    grad, q, k, v, out = (x.to(wide(dtype)) for x in (grad, q, _repeated(k, heads), _repeated(v, heads), out))
    weights = (_scores(q, k, is_causal, scale, mask) - lse.unsqueeze(-1)).exp()
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    dk, dv = _summed(of_scores.mT @ q, groups), _summed(weights.mT @ grad, groups)
    return (of_scores @ k).to(dtype), dk.to(dtype), dv.to(dtype)


# --- meta: no values, and as much memory as the fused kernels keep --------------------------------------------------


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _by_tokens(q), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _shapes_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_tokens(q), _by_tokens(k), _by_tokens(v)


def _by_tokens(x: Tensor) -> Tensor:
    """As `x`, but the heads of a token are neighbours, as in what the fused kernels give."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


_KERNELS = {
    "cpu": (_cpu, _cpu_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "math": (_math, _math_backward),
    "shapes": (_shapes, _shapes_backward),
}
