"""Signs of flat floats packed eight to a byte, under one scale, with error feedback.

A value x with the kept error e becomes y = x + e, y is quantized to scale * sgn(y), and e becomes the difference.
sgn(0) is +1. Bits are most significant first, as in `numpy.packbits`; 1 means not negative.

Tensors are on the host or all on one device, where kernels give the same bits; a device without kernels gets the
references. Sums of squares wait for the device.

Source: 1-bit Adam (arXiv 2102.02888), error-compensated compression.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from mpispeed.native import device_signs, status
from mpispeed.native.cuda import launcher
from mpispeed.native.flat import KINDS
from mpispeed.native.reduce import square_partials_reference
from mpispeed.native.status import check_tensors, check_threads

TILE = 256
"""Elements. Squares are summed in blocks of it; a range cut at multiples of it has the same sum."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def scale_of(squares: Iterable[float], length: int) -> float:
    """The root of the mean square, rounded to fp32; `squares` are those of `compensate` and `add_parts`."""
    if length == 0:
        return 0.0
    total = math.fsum(squares)
    return to_fp32(math.sqrt(total / length)) if math.isfinite(total) else total


def to_fp32(value: float) -> float:
    """The nearest fp32 number; infinity beyond the largest."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def compensate(
    error: Tensor, x: Tensor, *, keep: float = 1.0, grad: Tensor | None = None, take: float = 0.0, threads: int = 1
) -> list[float]:
    """Add keep * x + take * grad to `error`, in fp32; doubles whose exact sum is that of the squares of the result.

    On meta lengths and dtypes are checked, and there are no squares.

    Shapes: all of one length and on one device; `error` in fp32, `x` and `grad` in fp32, bf16 or fp16.

    Raises:
        ValueError: lengths, layouts or threads do not fit.
        TypeError: a dtype does not fit.
    """
    named = {"error": error, "x": x} if grad is None else {"error": error, "x": x, "grad": grad}
    length = _check("compensate", named, threads, takes_meta=True)
    if error.is_meta:
        return []
    if kernels := launcher.for_tensor(error):
        return device_signs.compensate(kernels, error, x, keep, grad, take)
    module = _host_loops(error)
    if module is None:
        return compensate_reference(error, x, keep=keep, grad=grad, take=take)
    second = (0, KINDS[torch.float32], 0.0) if grad is None else (grad.data_ptr(), KINDS[grad.dtype], take)
    squares: list[float] = module.mix(error.data_ptr(), (x.data_ptr(), KINDS[x.dtype], keep), second, length, threads)
    return squares


@torch.no_grad()
def compensate_reference(
    error: Tensor, x: Tensor, *, keep: float = 1.0, grad: Tensor | None = None, take: float = 0.0
) -> list[float]:
    """The same as `compensate`, in torch, with the same bits."""
    value = x.float() if keep == 1.0 and grad is None else x.float() * keep
    if grad is not None:
        value = value + grad.float() * take
    error.copy_(value + error)
    return square_partials_reference(error.cpu(), block=TILE)


def add_parts(error: Tensor, parts: Sequence[Tensor], weights: Sequence[float], *, threads: int = 1) -> list[float]:
    """Add the sum of `parts`, each decoded with its weight, to `error`; squares as from `compensate`.

    The sum is taken in list order, in fp32, before the error is added.

    Shapes: error [count], a multiple of 8, fp32; every part [count / 8], uint8.

    Raises:
        ValueError: there are no parts, or lengths, layouts or threads do not fit.
        TypeError: a dtype does not fit.
    """
    length = _check("add_parts", {"error": error}, threads)
    if not parts or len(parts) != len(weights):
        msg = f"add_parts: {len(parts)} parts and {len(weights)} weights; pass at least one part, and a weight for each"
        raise ValueError(msg)
    for i, part in enumerate(parts):
        _check_bits("add_parts", f"parts[{i}]", part, error, is_whole=True)
    if len(parts) <= device_signs.MOST_PARTS and (kernels := launcher.for_tensor(error)):
        return device_signs.add_parts(kernels, error, parts, weights)
    module = _host_loops(error)
    if module is None:
        return add_parts_reference(error, parts, weights)
    addresses = [part.data_ptr() for part in parts]
    squares: list[float] = module.add_parts(error.data_ptr(), addresses, list(weights), length, threads)
    return squares


@torch.no_grad()
def add_parts_reference(error: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """The same as `add_parts`, in torch, with the same bits."""
    total, *others = (_signs(part, error.numel()) * weight for part, weight in zip(parts, weights, strict=True))
    for other in others:
        total = total + other
    error.copy_(total + error)
    return square_partials_reference(error.cpu(), block=TILE)


def encode(bits: Tensor, error: Tensor, scale: float, *, threads: int = 1) -> None:
    """Write the signs of `error` to `bits`, and take scale times them away from `error`.

    Shapes: error [count], a multiple of 8, fp32; bits [count / 8], uint8.

    Raises:
        ValueError: lengths, layouts or threads do not fit.
        TypeError: a dtype does not fit.
    """
    length = _check("encode", {"error": error}, threads)
    _check_bits("encode", "bits", bits, error, is_whole=True)
    if kernels := launcher.for_tensor(error):
        device_signs.encode(kernels, bits, error, scale)
        return
    module = _host_loops(error)
    if module is None:
        encode_reference(bits, error, scale)
    else:
        module.encode(bits.data_ptr(), error.data_ptr(), scale, length, threads)


@torch.no_grad()
def encode_reference(bits: Tensor, error: Tensor, scale: float) -> None:
    """The same as `encode`, in torch, with the same bits."""
    flags = error >= 0.0
    places = _places(bits)
    bits.copy_((flags.view(-1, 8) * places).sum(1, dtype=torch.uint8))
    error.sub_(torch.where(flags, scale, -scale))


def decode(out: Tensor, bits: Tensor, scale: float, *, threads: int = 1) -> None:
    """Write scale times the signs to `out`.

    Shapes: out [count], fp32, bf16 or fp16; bits [count / 8, rounded up], uint8.

    Raises:
        ValueError: lengths, layouts or threads do not fit.
        TypeError: a dtype does not fit.
    """
    length = _check("decode", {"out": out}, threads)
    _check_bits("decode", "bits", bits, out, is_whole=False)
    if kernels := launcher.for_tensor(out):
        device_signs.decode(kernels, out, bits, scale)
        return
    module = _host_loops(out)
    if module is None:
        decode_reference(out, bits, scale)
    else:
        module.decode(out.data_ptr(), KINDS[out.dtype], bits.data_ptr(), scale, length, threads)


@torch.no_grad()
def decode_reference(out: Tensor, bits: Tensor, scale: float) -> None:
    """The same as `decode`, in torch, with the same bits."""
    out.copy_(_signs(bits, out.numel()) * scale)


def _places(bits: Tensor) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)


def _signs(bits: Tensor, count: int) -> Tensor:
    flags = (bits.view(-1, 1) & _places(bits)).ne(0).view(-1)[:count]
    return torch.where(flags, 1.0, -1.0)


def _host_loops(x: Tensor) -> ModuleType | None:
    return status.compiled("one_bit") if x.device.type == "cpu" else None


def _check(where: str, tensors: dict[str, Tensor], threads: int, *, takes_meta: bool = False) -> int:
    length = check_tensors(where, tensors, device=next(iter(tensors.values())).device, takes_meta=takes_meta)
    check_threads(where, threads)
    for name, x in tensors.items():
        wanted = (torch.float32,) if name == "error" else _FLOATS
        if x.dtype not in wanted:
            msg = f"{where}: {name} has dtype {x.dtype}; use {' or '.join(map(str, wanted))}"
            raise TypeError(msg)
    return length


def _check_bits(where: str, name: str, bits: Tensor, of: Tensor, *, is_whole: bool) -> None:
    check_tensors(where, {name: bits}, device=of.device)
    length = of.numel()
    if bits.dtype != torch.uint8:
        msg = f"{where}: {name} has dtype {bits.dtype}; bits are packed in uint8"
        raise TypeError(msg)
    if bits.numel() != -(-length // 8) or (is_whole and length % 8):
        msg = f"{where}: {name} has {bits.numel()} bytes for {length} elements; eight elements make a byte"
        raise ValueError(msg)
