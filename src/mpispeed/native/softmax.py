"""Softmax of attention scores: scaled, masked or causal, with dropout, forward and backward in one pass each.

Inside everything is fp32 (fp64 for fp64 tensors), and each stored value is rounded once. Dropout takes Philox bits of a
seed (`native.cuda.philox`), element by element, so backward repeats it and no mask is kept. A fully masked row gives
zeros.

Source: dS = A (dA - sum(dA A)), as in Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, equation 1.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.cuda import launcher, ops, philox
from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.compiled import launch as compiled
from mpispeed.native.face_kernels import faces

_THREADS = 128  # of a block that has several rows
_LONG_THREADS = 512
_SHORT, _MIDDLE, _BLOCK = 256, 512, 8192  # the longest rows of 32 lanes with 8 and 16 elements, and of a block
_MOST_ROWS = 2**31 - 1
_SCORE_DIMS = 4
_SEED_AT = 24  # bytes before the seed in SoftmaxTerms

_Masking = tuple[Tensor | None, int, tuple[int, ...]]
"""A mask as kernels read it, its kind, and its strides over batch, heads and queries."""

_How = tuple[float, bool, float, bool]
"""Scale, whether it is causal, ratio of the dropout, and whether its seed is read from memory."""


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
    ratio: float = 0.0,
    seed: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """Probabilities softmax(scale * scores + mask) over the last dim, then dropout of them.

    Args:
        scores: of queries and keys.
        mask: is broadcast against the scores. A float one is added, in its own precision; of a bool one the True
            elements take part. It gets no gradient. A row in which nothing takes part gives zeros.
        scale: of the scores.
        is_causal: a query sees no key after itself; the last query sees all keys. The upper triangle is exactly zero
            and is never used, whatever stands there.
        ratio: part of the probabilities that is dropped in training; the rest is divided by 1 - ratio.
        seed: of the dropout, as `philox.draw_seed` makes it; without one it is drawn from torch's generator of the
            host.
        training: False means no dropout.

    Shapes:
        scores, result: [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys].
        mask: any that broadcasts to it, such as [batch, 1, 1, keys].

    Raises:
        ValueError: dims, dtype, mask or ratio do not fit.
    """
    if mask is None and faces is not None and not (training and ratio) and not torch.compiler.is_compiling():
        at_once: Tensor | None = faces.softmax(scores, scale, is_causal)
        if at_once is not None:
            return at_once
    if not scores.is_floating_point() or not 1 < scores.dim() <= _SCORE_DIMS:
        msg = (
            f"scores are {scores.dtype} of shape {tuple(scores.shape)}; expected 2 to 4 dims of floating point numbers"
        )
        raise ValueError(msg)
    check_mask(mask, tuple(scores.shape), scores.device)
    drops = training and philox.threshold(ratio) > 0
    if drops and seed is None:
        seed = philox.draw_seed(scores)
    out: Tensor = _softmax(scores, mask, seed if drops else None, scale, is_causal, ratio if drops else 0.0)[0]
    return out


def causal_softmax(
    scores: Tensor, *, scale: float = 1.0, ratio: float = 0.0, seed: Tensor | None = None, training: bool = True
) -> Tensor:
    """Probabilities of queries that see no later key; `masked_softmax` with `is_causal` and without a mask."""
    return masked_softmax(scores, scale=scale, is_causal=True, ratio=ratio, seed=seed, training=training)


def check_mask(mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a mask for scores of this shape.

    Raises:
        ValueError: it does not fit.
    """
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        msg = f"the mask is {mask.dtype}; expected floats that are added, or bool with True for what takes part"
        raise ValueError(msg)
    if mask.device != device:
        msg = f"the mask is on {mask.device} and the scores on {device}; move the mask there"
        raise ValueError(msg)
    sizes = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    if len(sizes) != len(shape) or any(has not in (1, want) for has, want in zip(sizes, shape, strict=True)):
        msg = (
            f"a mask of shape {tuple(mask.shape)} does not broadcast to scores of shape {shape}; each of its dims has "
            "to be of the same size, or 1"
        )
        raise ValueError(msg)


# ---- forward ----------------------------------------------------------------------------------------------------


def run_softmax(
    scores: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> tuple[Tensor, Tensor]:
    """Probabilities after dropout, and before it; the second is empty if nothing is dropped."""
    scores = scores.contiguous()
    running = _launcher(scores)
    if running is None:
        return softmax_reference(scores, mask, seed, scale, is_causal, ratio)
    probs = torch.empty_like(scores)
    dropped = torch.empty_like(scores) if ratio else scores.new_empty(0)
    if scores.numel():
        mask, kind, strides = _prepared(mask, scores)
        out = dropped if ratio else None
        masking = (mask, kind, strides)
        how = (scale, is_causal, ratio, philox.is_place(seed))
        launch = _prepared_launch(running, "softmax", scores, (probs, out), masking, how)
        launch.seeded(philox.word(seed, how[3]), scores, mask, probs, out)
    return (dropped, probs) if ratio else (probs, dropped)


def softmax_reference(
    scores: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> tuple[Tensor, Tensor]:
    """`run_softmax` in torch."""
    z = _wide(scores) * scale
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if is_causal:
        z = z.masked_fill(_later(scores), -torch.inf)
    if not z.numel():
        return scores.clone(), scores.new_empty(0) if not ratio else scores.clone()
    top = z.amax(dim=-1, keepdim=True)
    raised = torch.exp(z - top.masked_fill(top == -torch.inf, 0.0))
    total = raised.sum(dim=-1, keepdim=True)
    inverse = torch.where(total == 0, 0.0, 1.0 / total)
    probs = (raised * inverse).to(scores.dtype)
    return (dropout_reference(probs, seed, ratio), probs) if ratio else (probs, scores.new_empty(0))


def _later(scores: Tensor) -> Tensor:
    """True above the diagonal that ends in the last corner."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ---- backward ---------------------------------------------------------------------------------------------------


def run_softmax_backward(
    grad: Tensor, probs: Tensor, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> Tensor:
    """The gradient of the scores from that of the probabilities after dropout."""
    grad, probs = grad.contiguous(), probs.contiguous()
    running = _launcher(probs)
    if running is None or grad.dtype != probs.dtype:
        return softmax_backward_reference(grad, probs, seed, scale, is_causal, ratio)
    out = torch.empty_like(probs)
    if probs.numel():
        none = (None, 0, (0, 0, 0))
        how = (scale, is_causal, ratio, philox.is_place(seed))
        launch = _prepared_launch(running, "softmax_grad", probs, (grad, out), none, how)
        launch.seeded(philox.word(seed, how[3]), probs, grad, out)
    return out


def softmax_backward_reference(
    grad: Tensor, probs: Tensor, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> Tensor:
    """`run_softmax_backward` in torch."""
    p, g = _wide(probs), _wide(grad)
    if is_causal:
        g = g.masked_fill(_later(probs), 0.0)
    if ratio:
        g = torch.where(_kept(g, seed, ratio), g * (1.0 / (1.0 - ratio)), 0.0)
    return (scale * (p * (g - (p * g).sum(dim=-1, keepdim=True)))).to(probs.dtype)


# ---- dropout alone ----------------------------------------------------------------------------------------------


def run_dropout(probs: Tensor, seed: Tensor | None, ratio: float) -> Tensor:
    """The probabilities after dropout, recomputed: the same bits as from `run_softmax`."""
    probs = probs.contiguous()
    running = _launcher(probs)
    if running is None:
        return dropout_reference(probs, seed, ratio)
    out = torch.empty_like(probs)
    count = probs.numel()
    if count:
        grid = min(-(-count // (256 * (16 // probs.element_size()))), 16 * running.processors)
        by_place = philox.is_place(seed)
        words = (count, philox.word(seed, by_place), philox.threshold(ratio), 1.0 / (1.0 - ratio), by_place)
        name, pointers = f"dropout_{TAGS[probs.dtype]}", (probs.data_ptr(), out.data_ptr())
        running.launch(name, (grid, 1, 1), (256, 1, 1), *pointers, *words)
    return out


def dropout_reference(probs: Tensor, seed: Tensor | None, ratio: float) -> Tensor:
    """`run_dropout` in torch."""
    x = _wide(probs)
    return torch.where(_kept(x, seed, ratio), x * (1.0 / (1.0 - ratio)), 0.0).to(probs.dtype)


def _kept(x: Tensor, seed: Tensor | None, ratio: float) -> Tensor:
    return philox.kept(philox.word(seed, False), x.numel(), ratio, x.device).view(x.shape)


# ---- launches ---------------------------------------------------------------------------------------------------


def _launcher(x: Tensor) -> launcher.Launcher | None:
    fits = x.dtype in TAGS and x.shape[:-1].numel() <= _MOST_ROWS and x.shape[-1] < 2**31
    return launcher.for_tensor(x) if fits else None


def _prepared(mask: Tensor | None, scores: Tensor) -> _Masking:
    """The mask as kernels read it, its kind, and its strides over batch, heads and queries; the last dim is dense."""
    if mask is None:
        return None, 0, (0, 0, 0)
    if mask.dtype not in (torch.bool, torch.float32, scores.dtype):
        mask = mask.float()
    kind = 3 if mask.dtype == torch.bool else 1 if mask.dtype == scores.dtype else 2
    keys = scores.shape[-1]
    if mask.dim() == 0 or mask.shape[-1] != keys or (keys > 1 and mask.stride(-1) != 1):
        mask = (mask if mask.dim() else mask[None]).expand(*mask.shape[:-1], keys).contiguous()
    whole = mask.expand(scores.shape)
    return mask, kind, (0, 0, 0, *whole.stride()[:-1])[-3:]


def _prepared_launch(
    running: launcher.Launcher, stem: str, x: Tensor, others: tuple[Tensor | None, ...], masking: _Masking,
    how: _How,
) -> launcher.Prepared:  # fmt: skip
    """The launch for rows as of x, that takes a seed; `others` are read or written by the same accesses."""
    mask, kind, strides = masking
    wide = 16 // x.element_size()
    is_fitting = mask is not None and mask.data_ptr() % (wide * mask.element_size()) == 0
    return _kept_launch(running, stem, x, (kind, strides, is_fitting), how, compiled.are_aligned(x, *others))


def _plain_launch(
    running: launcher.Launcher, x: Tensor, stem: str, scale: float, is_causal: bool, is_aligned: bool
) -> launcher.Prepared:
    """The launch without mask and dropout."""
    return _kept_launch(running, stem, x, (0, (0, 0, 0), False), (scale, is_causal, 0.0, False), is_aligned)


def _kept_launch(
    running: launcher.Launcher, stem: str, x: Tensor, masking: tuple[int, tuple[int, ...], bool], how: _How,
    is_aligned: bool,
) -> launcher.Prepared:  # fmt: skip
    kind, strides, is_fitting = masking
    key = (stem, x.shape, x.dtype, kind, strides, is_fitting, is_aligned, how)
    found: launcher.Prepared | None = running.kept.get(key)
    if found is None:
        is_wide = x.shape[-1] * x.element_size() % 16 == 0 and is_aligned
        terms = _terms(x, masking, how, is_wide)
        name, grid, threads = _shape_of_launch(stem, x, is_wide, how[2])
        found = launcher.keep(running, key, running.prepare(name, grid, threads, terms, 0, _SEED_AT))
    return found


def _terms(x: Tensor, masking: tuple[int, tuple[int, ...], bool], how: _How, is_wide: bool) -> bytes:
    """The structure SoftmaxTerms for scores, or probabilities, of this shape and dtype."""
    shape, wide = x.shape, 16 // x.element_size()
    heads = shape[1] if len(shape) == _SCORE_DIMS else 1
    if len(shape) < _SCORE_DIMS:  # [batch, queries, keys]: batches take the place of heads
        heads = shape[0] if len(shape) == _SCORE_DIMS - 1 else 1
    kind, strides, fits = masking
    scale, is_causal, ratio, by_place = how
    lane_bits = _lane_bits(shape[-1], _share(x, is_wide))
    words = (shape[:-1].numel(), shape[-1], *_divisor(shape[-2]), *_divisor(heads), lane_bits, kind)
    flags = (fits and not any(stride % wide for stride in strides), is_causal, philox.threshold(ratio))
    return struct.pack("4Q13I2fI", *strides, 0, *words, *flags, scale, 1.0 / (1.0 - ratio), by_place)


def _divisor(by: int) -> tuple[int, int, int]:
    """The structure QuickDivisor: n // by == (2 * n * factor >> 32) >> shift for n below 2^31."""
    shift = (by - 1).bit_length()
    return by, -(-(1 << 31 + shift) // by), shift


def _share(x: Tensor, is_wide: bool) -> int:
    """Elements of a row for each lane; 16-bit numbers of whole packets take half the instructions in shares of 16."""
    return 8 if x.shape[-1] <= _SHORT and (not is_wide or x.element_size() > 2) else 16


def _lane_bits(columns: int, share: int) -> int:
    return min(5, (-(-columns // share) - 1).bit_length())


def _shape_of_launch(stem: str, x: Tensor, is_wide: bool, ratio: float) -> tuple[str, launcher.Size, launcher.Size]:
    """Kernel, grid and threads for rows of this length, of whole packets at multiples of 16 bytes or not."""
    columns, rows = x.shape[-1], x.shape[:-1].numel()
    threads, blocks, share = _THREADS, rows, _share(x, is_wide)
    if columns <= (_MIDDLE if is_wide else _SHORT):
        kind = str(share)
        blocks = -(-rows // (_THREADS >> _lane_bits(columns, share)))
    elif columns <= _BLOCK:
        each = 16 if is_wide and x.element_size() == 2 else 8
        kind, threads = "block", -(-columns // (32 * each)) * 32
    else:
        kind, threads = "long", _LONG_THREADS
    name = f"{stem}_{'drop_' if ratio else ''}{'' if is_wide else 'single_'}{kind}_{TAGS[x.dtype]}"
    return name, (blocks, 1, 1), (threads, 1, 1)


if faces is not None:
    faces.prepare_softmax = _plain_launch


# ---- operators --------------------------------------------------------------------------------------------------


def _fake_softmax(
    scores: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return made, torch.empty_like(made) if ratio else scores.new_empty(0)


def _fake_backward(
    grad: Tensor, probs: Tensor, seed: Tensor | None, scale: float, is_causal: bool, ratio: float
) -> Tensor:
    return torch.empty_like(probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, seed, ctx.scale, ctx.is_causal, ctx.ratio = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1] if ctx.ratio else output[0], seed)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    probs, seed = ctx.saved_tensors
    dx = None if grad is None else _backward(grad, probs, seed, ctx.scale, ctx.is_causal, ctx.ratio)
    return dx, None, None, None, None, None


_backward = ops.define(
    "masked_softmax_backward(Tensor grad, Tensor probs, Tensor? seed, float scale, bool is_causal, float ratio)"
    " -> Tensor",
    run_softmax_backward,
    _fake_backward,
)
_softmax = ops.define(
    "masked_softmax(Tensor scores, Tensor? mask, Tensor? seed, float scale, bool is_causal, float ratio)"
    " -> (Tensor, Tensor)",
    run_softmax,
    _fake_softmax,
    autocast=("scores",),
)
ops.differentiate(_softmax, _save, _differentiate)
