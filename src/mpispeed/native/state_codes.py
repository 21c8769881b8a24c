"""States of optimizers at rest: 8-bit codes with a scale for each 256 elements, 16-bit floats, and pairs of them.

**8 bits.** A block of 256 elements has the scale s = its largest magnitude. A code c stands for s * (c / 255)**4, or,
with a sign, for sign(c) * s * (|c| / 127)**4: fine steps at the top of a block and ever wider ones below, over more
than nine (seven) decades. The nearest level is taken, or, with a seed, one of the two around a value, with
probabilities whose mean is the value. Zero is exact; without a sign no positive value becomes zero; the largest value
of a block is exact; coding the decoded values again gives the same codes and scales. Corners:

- Scales are at least 2**-94 (2**-98 with a sign), so that no level is subnormal, or 0 where all elements are. Subnormal
  values count as 0, without a sign as the least level.
- A block with an infinity, a NaN or, without a sign, a negative value has the scale NaN and comes back as NaN
  throughout, so that an overflow is seen.

**Random rounding** takes its bits from Philox, by (seed, step, number of the element): neither threads, nor the cut of
a tensor, nor the device change a bit. A probability is off by 2**-17 at most. States that are rounded in one step take
different seeds.

**Pairs.** `split` gives the nearest 16-bit float and that of what is left, `join` their sum: 16 bits of mantissa of two
bf16, 22 of two fp16.

Tensors are contiguous, on the host or all on one device, where kernels give the same bytes; a device without kernels
gets the references. Of tensors on meta lengths and dtypes are checked.

Sources: block-wise codes of states, Dettmers et al., arXiv 2110.02861; compensated sums, Kahan 1965; Philox, Salmon et
al., SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from mpispeed.native import status
from mpispeed.native.cuda import philox
from mpispeed.native.flat import KINDS, REFERENCE_SPAN, divisor
from mpispeed.native.status import any_overlap, check_tensors, check_threads

BLOCK = 256
"""Elements that share a scale; cuts at multiples of it do not change codes."""

_HALVES = (torch.bfloat16, torch.float16)
_SUBNORMAL, _INFINITY, _MAGNITUDE = 0x00800000, 0x7F800000, 0x7FFFFFFF
_TOP = {True: 127, False: 255}
_SMALLEST_SCALE = {True: 2.0**-98, False: 2.0**-94}


def scale_count(count: int) -> int:
    """Scales of `count` elements."""
    return -(-count // BLOCK)


# -- 8 bits ----------------------------------------------------------------------------------------------------------


def encode8(
    codes: Tensor, scales: Tensor, x: Tensor, *, signed: bool, seed: int | None = None, step: int = 0, start: int = 0,
    threads: int = 1,
) -> None:  # fmt: skip
    """Fill `codes` and `scales` with those of `x`.

    Args:
        codes: uint8 [n]; with a sign it is that of two's complement.
        scales: fp32 [ceil(n / 256)].
        x: fp32 [n].
        signed: whether values have signs; without, they are not negative.
        seed: of random rounding; None: to the nearest level, the lower one of two.
        step: of the training, for random rounding: others give other bits.
        start: number of the first element, for random rounding.
        threads: on the host.

    Raises:
        ValueError: lengths, layouts, devices, overlaps, numbers or threads do not fit.
        TypeError: a dtype does not fit.
    """
    _check8("encode8", codes, scales, {"x": x}, threads)
    _check_draw("encode8", seed, step, start)
    if x.is_meta or not x.numel():
        return
    module = _host_loops(x)
    if module is None:
        encode8_reference(codes, scales, x, signed=signed, seed=seed, step=step, start=start)
        return
    draw = None if seed is None else _draw(seed, step, start)
    module.encode8(codes.data_ptr(), scales.data_ptr(), x.data_ptr(), x.numel(), signed, draw, threads)


@torch.no_grad()
def encode8_reference(
    codes: Tensor, scales: Tensor, x: Tensor, *, signed: bool, seed: int | None = None, step: int = 0, start: int = 0,
    threads: int = 1,
) -> None:  # fmt: skip
    """As `encode8`, in torch, with the same bytes; `threads` is accepted for symmetry."""
    _check8("encode8", codes, scales, {"x": x}, threads)
    _check_draw("encode8", seed, step, start)
    top = _TOP[signed]
    for begin in range(0, x.numel(), REFERENCE_SPAN):
        part = x[begin : begin + REFERENCE_SPAN]
        value = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        bits = value.view(torch.int32)
        size = bits & _MAGNITUDE
        is_bad = (size >= _INFINITY) if signed else (size >= _INFINITY) | ((bits < 0) & (size > 0))
        regular = torch.where(size < _SUBNORMAL, 0, size)
        peak = (regular if signed else size).amax(1, keepdim=True)
        scale = torch.where(peak > 0, peak.view(torch.float32).clamp_min(_SMALLEST_SCALE[signed]), 0.0)
        scale = scale.masked_fill(is_bad.any(1, keepdim=True), torch.nan)
        y = regular.view(torch.float32) / torch.where(scale > 0, scale, 1.0)
        code = y.sqrt().sqrt().mul(top).nan_to_num(0.0, 0.0, 0.0).to(torch.int32).clamp_max(top - 1)
        low, high = _level(code, top), _level(code + 1, top)
        share: float | Tensor = 0.5
        if seed is not None:
            words = philox.halves(seed, step, start + begin, value.numel(), x.device)
            share = (words.float() + 0.5).mul(2.0**-16).view_as(value)
        code = code + (y - low > (high - low) * share)
        code = torch.where(bits < 0, -code, code) if signed else torch.where((code == 0) & (size > 0), 1, code)
        code = torch.where(scale > 0, code, 0).to(torch.int8 if signed else torch.uint8).view(torch.uint8)
        codes[begin : begin + part.numel()] = code.view(-1)[: part.numel()]
        scales[begin // BLOCK : begin // BLOCK + scale.numel()] = scale.view(-1)


def decode8(out: Tensor, codes: Tensor, scales: Tensor, *, signed: bool, threads: int = 1) -> None:
    """Fill `out` with the values of codes.

    Shapes: out fp32 [n], codes uint8 [n], scales fp32 [ceil(n / 256)].

    Raises:
        ValueError, TypeError: as `encode8`.
    """
    _check8("decode8", codes, scales, {"out": out}, threads)
    if out.is_meta or not out.numel():
        return
    module = _host_loops(out)
    if module is None:
        decode8_reference(out, codes, scales, signed=signed)
        return
    module.decode8(out.data_ptr(), codes.data_ptr(), scales.data_ptr(), out.numel(), signed, threads)


@torch.no_grad()
def decode8_reference(out: Tensor, codes: Tensor, scales: Tensor, *, signed: bool, threads: int = 1) -> None:
    """As `decode8`, in torch, with the same bits; `threads` is accepted for symmetry."""
    _check8("decode8", codes, scales, {"out": out}, threads)
    for begin in range(0, out.numel(), REFERENCE_SPAN):
        part = codes[begin : begin + REFERENCE_SPAN]
        code = (part.view(torch.int8) if signed else part).to(torch.int32)
        scale = scales[begin // BLOCK : begin // BLOCK + scale_count(part.numel())]
        level = _level(code.abs(), _TOP[signed]) * scale.repeat_interleave(BLOCK)[: part.numel()]
        out[begin : begin + part.numel()] = torch.where(code < 0, -level, level)


def _level(code: Tensor, top: int) -> Tensor:
    """(code / top)**4 as every loop computes it; 1 at the top."""
    wide = code.float()
    root = wide * wide * (torch.ones((), device=code.device) / divisor(float(top * top), wide))
    return root * root


# -- 16 bits ---------------------------------------------------------------------------------------------------------


def round_stochastic(out: Tensor, x: Tensor, *, seed: int, step: int, start: int = 0, threads: int = 1) -> None:
    """Fill `out` with one of the two 16-bit neighbours of every value, so that its mean is the value.

    Exact for bf16 and for normal fp16, and to 2**-17 of a step for subnormal fp16. What is a 16-bit float stays as it
    is. Beyond the largest number the nearest is taken, which may be infinite; a NaN stays one.

    Args:
        out: bf16 or fp16 [n].
        x: fp32 [n].
        seed: of the state.
        step: of the training.
        start: number of the first element.
        threads: on the host.

    Raises:
        ValueError: lengths, layouts, devices, overlaps, numbers or threads do not fit.
        TypeError: a dtype does not fit.
    """
    _check16("round_stochastic", {"out": out}, {"x": x}, threads)
    _check_draw("round_stochastic", seed, step, start)
    if x.is_meta or not x.numel():
        return
    module = _host_loops(x)
    if module is None:
        round_stochastic_reference(out, x, seed=seed, step=step, start=start)
        return
    module.round(out.data_ptr(), KINDS[out.dtype], x.data_ptr(), x.numel(), _draw(seed, step, start), threads)


@torch.no_grad()
def round_stochastic_reference(
    out: Tensor, x: Tensor, *, seed: int, step: int, start: int = 0, threads: int = 1
) -> None:
    """As `round_stochastic`, in torch, with the same bits; `threads` is accepted for symmetry."""
    _check16("round_stochastic", {"out": out}, {"x": x}, threads)
    _check_draw("round_stochastic", seed, step, start)
    dropped = 16 if out.dtype == torch.bfloat16 else 13
    for begin in range(0, x.numel(), REFERENCE_SPAN):
        value = x[begin : begin + REFERENCE_SPAN]
        words = philox.halves(seed, step, start + begin, value.numel(), x.device)
        bits = value.view(torch.int32)
        size, sign = (bits & _MAGNITUDE).long(), torch.where(bits < 0, -1.0, 1.0)
        moved = (size + (words & (1 << dropped) - 1)) >> dropped << dropped
        drawn = moved.int().view(torch.float32)
        if out.dtype == torch.float16:  # below 2**-14 a step is 2**-24
            steps = size.clamp_max((113 << 23) - 1).int().view(torch.float32) * 2.0**24
            whole = steps.floor()
            whole = whole + (steps - whole > (words.float() + 0.5) * 2.0**-16)
            drawn = torch.where(size < 113 << 23, whole * 2.0**-24, drawn)
        found = (drawn * sign).to(out.dtype)
        is_out = found.isfinite().logical_not() | (size >= _INFINITY)
        out[begin : begin + value.numel()] = torch.where(is_out, value.to(out.dtype), found)


def encode16(out: Tensor, x: Tensor, *, threads: int = 1) -> None:
    """Fill `out` (bf16 or fp16 [n]) with the nearest to `x` (fp32 [n]), ties to even.

    Raises:
        ValueError, TypeError: as `round_stochastic`.
    """
    _check16("encode16", {"out": out}, {"x": x}, threads)
    _run16("encode16", (out,), x, threads)


def decode16(out: Tensor, x: Tensor, *, threads: int = 1) -> None:
    """Fill `out` (fp32 [n]) with `x` (bf16 or fp16 [n]).

    Raises:
        ValueError, TypeError: as `round_stochastic`.
    """
    _check16("decode16", {"x": x}, {"out": out}, threads)
    _run16("decode16", (x,), out, threads)


def split(high: Tensor, low: Tensor, x: Tensor, *, threads: int = 1) -> None:
    """Fill `high` with the nearest 16-bit floats and `low` with those of what is left of `x`.

    Where `high` is not finite `low` is zero.

    Shapes: high and low bf16 or fp16 [n], of one dtype; x fp32 [n].

    Raises:
        ValueError, TypeError: as `round_stochastic`.
    """
    _check16("split", {"high": high, "low": low}, {"x": x}, threads)
    _run16("split", (high, low), x, threads)


def join(out: Tensor, high: Tensor, low: Tensor, *, threads: int = 1) -> None:
    """Fill `out` with high + low, in fp32; `split` of it gives the same sum again.

    Shapes: out fp32 [n]; high and low bf16 or fp16 [n], of one dtype.

    Raises:
        ValueError, TypeError: as `round_stochastic`.
    """
    _check16("join", {"high": high, "low": low}, {"out": out}, threads)
    _run16("join", (high, low), out, threads)


def _run16(name: str, halves: tuple[Tensor, ...], wide: Tensor, threads: int) -> None:
    if wide.is_meta or not wide.numel():
        return
    module = _host_loops(wide)
    if module is None:
        _REFERENCES[name](wide, *halves)
        return
    places = [half.data_ptr() for half in halves]
    getattr(module, name)(wide.data_ptr(), *places, KINDS[halves[0].dtype], wide.numel(), threads)


@torch.no_grad()
def split_reference(x: Tensor, high: Tensor, low: Tensor) -> None:
    """As `split`, in torch, with the same bits."""
    high.copy_(x)
    low.copy_(torch.where(high.isfinite(), x - high.float(), 0.0))


@torch.no_grad()
def join_reference(out: Tensor, high: Tensor, low: Tensor) -> None:
    """As `join`, in torch, with the same bits."""
    out.copy_(high).add_(low)


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


# by the name of the loop; of fp32 numbers and halves
_REFERENCES: dict[str, Callable[..., None]] = {
    "encode16": lambda x, out: _copy(out, x),
    "decode16": _copy,
    "split": split_reference,
    "join": join_reference,
}


# -- checks ----------------------------------------------------------------------------------------------------------


def _host_loops(x: Tensor) -> ModuleType | None:
    return status.compiled("state_codes") if x.device.type == "cpu" else None


def _draw(seed: int, step: int, start: int) -> tuple[int, int, int]:
    return seed % 2**64, step, start


def _check_draw(where: str, seed: int | None, step: int, start: int) -> None:
    if seed is not None and (not 0 <= step < 2**63 or not 0 <= start < 2**62):
        msg = f"{where}: step {step} and start {start}; pass numbers that are not negative"
        raise ValueError(msg)


def _check8(where: str, codes: Tensor, scales: Tensor, floats: dict[str, Tensor], threads: int) -> None:
    check_threads(where, threads)
    count = check_tensors(where, {**floats, "codes": codes}, device=codes.device, takes_meta=True)
    if check_tensors(where, {"scales": scales}, device=codes.device, takes_meta=True) != scale_count(count):
        msg = f"{where}: {scales.numel()} scales for {count} elements; there is one for each {BLOCK}"
        raise ValueError(msg)
    _check_dtypes(where, {"codes": codes}, (torch.uint8,))
    _check_dtypes(where, {**floats, "scales": scales}, (torch.float32,))
    _check_apart(where, (codes, scales, *floats.values()))


def _check16(where: str, halves: dict[str, Tensor], wide: dict[str, Tensor], threads: int) -> None:
    check_threads(where, threads)
    device = next(iter(wide.values())).device
    check_tensors(where, {**wide, **halves}, device=device, takes_meta=True)
    _check_dtypes(where, wide, (torch.float32,))
    _check_dtypes(where, halves, _HALVES)
    if len({half.dtype for half in halves.values()}) > 1:
        msg = f"{where}: {' and '.join(f'{name} is {half.dtype}' for name, half in halves.items())}; use one dtype"
        raise TypeError(msg)
    _check_apart(where, (*wide.values(), *halves.values()))


def _check_dtypes(where: str, tensors: dict[str, Tensor], wanted: tuple[torch.dtype, ...]) -> None:
    for name, x in tensors.items():
        if x.dtype not in wanted:
            msg = f"{where}: {name} has dtype {x.dtype}; use {' or '.join(map(str, wanted))}"
            raise TypeError(msg)


def _check_apart(where: str, tensors: tuple[Tensor, ...]) -> None:
    if any_overlap(tensors):
        msg = f"{where}: two tensors share memory; give each its own"
        raise ValueError(msg)
