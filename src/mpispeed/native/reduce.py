"""Sums of buffers in a fixed tree, and sums of squares that are independent of the division of a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpispeed.native import exact_squares, status
from mpispeed.native.flat import KINDS, REFERENCE_SPAN
from mpispeed.native.status import check_tensors, check_threads, is_same_memory, overlaps

_MOST_PARTS = 65536
_LANES = 16
HALF_DTYPES = (torch.bfloat16, torch.float16)
# (dtype of the parts, dtype of out) for which a compiled loop exists
_SUM_LOOPS = {
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
}
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BITWISE = ("band", "bor", "bxor")


def tree_sum(out: Tensor, parts: Sequence[Tensor], *, scale: float = 1.0, threads: int = 1) -> None:
    """Write `scale * sum(parts)` to `out`, added in a fixed pairwise tree over the order of the list.

    Neighbours (0+1), (2+3), ... are added, an odd one passes up, and so on. 16-bit floats and fp32
    are summed and scaled in fp32, fp64 in fp64, integers in their dtype; booleans are joined by "or".
    The result is rounded once, at the end. `out` may be one of the parts, and may be fp32 when the
    parts are 16-bit floats (or a 16-bit float when they are fp32).

    Shapes:
        All tensors are contiguous, on the host and of equal length.

    Raises:
        ValueError: there are no parts or too many, or lengths, layouts, overlaps or threads do not fit.
        TypeError: dtypes differ, or `scale` is used with integers.
    """
    length = _check_parts("tree_sum", out, parts)
    check_threads("tree_sum", threads)
    dtype = parts[0].dtype
    if scale != 1.0 and not (dtype.is_floating_point or dtype.is_complex):
        msg = f"tree_sum: scale {scale} with parts of {dtype}; integers can only be summed, scale the result yourself"
        raise TypeError(msg)
    module = status.compiled("fp_sum") if (dtype, out.dtype) in _SUM_LOOPS else None
    if module is None:
        _run_reference(out, parts, "sum", float(scale))
        return
    module.tree_sum(
        out.data_ptr(), [x.data_ptr() for x in parts], length, KINDS[dtype], KINDS[out.dtype], float(scale), threads
    )


def tree_sum_reference(out: Tensor, parts: Sequence[Tensor], *, scale: float = 1.0, threads: int = 1) -> None:
    """The same sum as `tree_sum`, in torch, with the same bits; `threads` is accepted for symmetry.

    Raises:
        ValueError: there are no parts or too many, or lengths, layouts or overlaps do not fit.
        TypeError: dtypes differ.
    """
    _check_parts("tree_sum", out, parts)
    _run_reference(out, parts, "sum", float(scale))


def tree_reduce(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Write the `op` of the parts to `out`, in the tree of `tree_sum`.

    `op` is "sum", "prod", "min" or "max", or for integers "band", "bor" or "bxor". 16-bit floats are worked on in fp32
    and rounded once. NaN wins in "min" and "max".

    Shapes:
        All tensors are contiguous, on the host and of equal length; `out` may be one of the parts.

    Raises:
        ValueError: `op` is unknown, there are no parts, or lengths, layouts or overlaps do not fit.
        TypeError: dtypes differ, complex numbers are to be ordered, or bits of floats combined.
    """
    if op not in PAIRWISE:
        msg = f"tree_reduce: unknown op {op!r}; use one of {', '.join(PAIRWISE)}"
        raise ValueError(msg)
    if op == "sum":
        tree_sum(out, parts)
        return
    _check_parts("tree_reduce", out, parts)
    if op in ("min", "max") and out.dtype.is_complex:
        msg = f"tree_reduce: {op} of {out.dtype}; complex numbers have no order"
        raise TypeError(msg)
    if op in _BITWISE and (out.dtype.is_floating_point or out.dtype.is_complex):
        msg = f"tree_reduce: {op} of {out.dtype}; only integers have bits to combine"
        raise TypeError(msg)
    _run_reference(out, parts, op, 1.0)


def _check_parts(where: str, out: Tensor, parts: Sequence[Tensor]) -> int:
    if not 1 <= len(parts) <= _MOST_PARTS:
        msg = f"{where}: {len(parts)} parts; between 1 and {_MOST_PARTS} are possible"
        raise ValueError(msg)
    dtype = parts[0].dtype
    named = {"out": out, **{f"parts[{i}]": x for i, x in enumerate(parts)}}
    length = check_tensors(where, named)
    for i, x in enumerate(parts):
        if x.dtype != dtype:
            msg = f"{where}: parts[{i}] has dtype {x.dtype} but parts[0] has {dtype}; they must be equal"
            raise TypeError(msg)
        if overlaps(out, x) and not is_same_memory(out, x):
            msg = f"{where}: out and parts[{i}] overlap without being the same range; use another buffer for out"
            raise ValueError(msg)
    if out.dtype != dtype and (dtype, out.dtype) not in _SUM_LOOPS:
        msg = f"{where}: out has dtype {out.dtype} and the parts {dtype}; use the same, or fp32 with a 16-bit float"
        raise TypeError(msg)
    return length


@torch.no_grad()
def _run_reference(out: Tensor, parts: Sequence[Tensor], op: str, scale: float) -> None:
    flat = [x.detach().view(-1) for x in parts]
    flat_out = out.detach().view(-1)
    join = PAIRWISE[op]
    for begin in range(0, out.numel(), REFERENCE_SPAN):
        cut = slice(begin, begin + REFERENCE_SPAN)
        level = [x[cut].float() if x.dtype in HALF_DTYPES else x[cut] for x in flat]
        while len(level) > 1:
            odd = level[len(level) - len(level) % 2 :]
            level = [join(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)] + odd
        result = level[0] if scale == 1.0 else level[0] * scale
        flat_out[cut].copy_(result)


def square_partials(x: Tensor, *, block: int = 256, threads: int = 1) -> list[float]:
    """A short list of doubles whose exact sum is the sum of the squares of `x`, block by block.

    Each block of `block` elements, counted from the start of `x`, is summed in fp64 in a fixed
    order; the block sums are then added without rounding. Concatenate the lists of neighbouring
    ranges and apply `math.fsum`: the total does not depend on the division of the flat buffer at multiples of `block`,
    nor on `threads`. Any NaN in `x` gives [nan]; any infinity, or a block sum beyond fp64, gives [inf].

    Shapes:
        `x` is contiguous; fp32, bf16, fp16 or fp64.

    Raises:
        ValueError: the layout, block or threads do not fit.
        TypeError: the dtype is none of these.
    """
    if x.device.type != "cpu":
        return exact_squares.square_partials([x.detach().view(-1)], block=block)
    length = _check_squares(x, block)
    check_threads("square_partials", threads)
    module = status.compiled("fp_sum")
    if module is None:
        return square_partials_reference(x, block=block)
    partials: list[float] = module.square_partials(x.data_ptr(), length, block, KINDS[x.dtype], threads)
    return partials


def square_partials_reference(x: Tensor, *, block: int = 256, threads: int = 1) -> list[float]:
    """The same as `square_partials` in torch: the lists may differ, their exact sums do not.

    Raises:
        ValueError: the layout or block does not fit.
        TypeError: the dtype is not fp32, bf16, fp16 or fp64.
    """
    length = _check_squares(x, block)
    sums: list[float] = []
    flat = x.detach().view(-1)
    span = max(1, REFERENCE_SPAN // block) * block
    for begin in range(0, length, span):
        sums.extend(_block_sums(flat[begin : begin + span], block))
    special = sum(s for s in sums if not math.isfinite(s))
    if special != 0.0:
        return [special]
    return _exact_partials(sums)


def _check_squares(x: Tensor, block: int) -> int:
    length = check_tensors("square_partials", {"x": x})
    if x.dtype not in KINDS:
        msg = f"square_partials: x has dtype {x.dtype}; use fp32, bf16, fp16 or fp64"
        raise TypeError(msg)
    if block < 1:
        msg = f"square_partials: block is {block}; pass 1 or more"
        raise ValueError(msg)
    return length


def _block_sums(x: Tensor, block: int) -> list[float]:
    """Sums of squares of all blocks, in the sixteen lanes of the compiled loop; zeros in the padding add nothing."""
    blocks = -(-x.numel() // block)
    rows = -(-block // _LANES)
    wide = torch.zeros(blocks * block, dtype=torch.float64)
    wide[: x.numel()] = x
    padded = torch.zeros(blocks, rows * _LANES, dtype=torch.float64)
    padded[:, :block] = wide.view(blocks, block)
    lanes = torch.zeros(blocks, _LANES, dtype=torch.float64)
    for row in padded.view(blocks, rows, _LANES).unbind(1):
        lanes = lanes + row * row
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: list[float] = lanes[:, 0].tolist()
    return sums


def _exact_partials(values: list[float]) -> list[float]:
    """A few doubles with the same exact sum: the rounding error of `fsum` is summed again until it is 0."""
    partials: list[float] = []
    while True:
        rest = math.fsum([*values, *(-p for p in partials)])
        if rest == 0.0:
            return partials
        partials.append(rest)
