"""Quantizers for training: values are rounded to those of a few bits, gradients are copied (straight through).

A tensor counts as G equal rows in its memory order, each with a scale of its own. Symmetric: s = 2 max|x| / 2^b and
y = clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) s. Asymmetric: s = (max - min) / 2^b, z = round(min / s) s and
y = clamp(round((x - z) / s), 0, 2^b - 1) s + z. Two bits are ternary: y = a sign(x) where |x| > 0.7 mean|x|, a the mean
of these |x|, else 0. One bit is binary: y = mean|x| sign(x). All in fp32, rounded once to the dtype of x.

Source: Yao et al., "ZeroQuant", arXiv 2206.01861 (groups, symmetric and asymmetric); Li et al., "Ternary Weight
Networks", arXiv 1605.04711; Rastegari et al., "XNOR-Net", arXiv 1603.05279 (binary).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError

MOST_BITS = 16
_THRESHOLD = 0.7  # of the mean magnitude: elements below are zero in ternary values


@dataclass(frozen=True, slots=True)
class Quantizer:
    """The way in which a tensor is quantized.

    Attributes:
        kind: range of the integers.
        rounding: to the nearest, ties to even; or stochastic, which adds noise from [-1/2, 1/2) first.
        groups: equal rows that the tensor is cut into, each with its own scale.
    """

    kind: Literal["symmetric", "asymmetric"] = "symmetric"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    groups: int = 1

    def reason_against(self, bits: int, shape: torch.Size | tuple[int, ...]) -> str:
        """Why a tensor of this shape cannot be quantized so; "" if it can."""
        if not 1 <= bits <= MOST_BITS:
            return f"{bits} bits; use 1 to {MOST_BITS}"
        if bits <= 2 and (self.kind != "symmetric" or self.rounding != "nearest"):
            return f"{bits} bits, {self.kind} and {self.rounding}; up to 2 bits are symmetric and nearest only"
        numel = math.prod(shape)
        if self.groups < 1 or numel % self.groups:
            return f"{numel} elements of shape {tuple(shape)} are not divisible into {self.groups} equal groups"
        return ""


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized tensor.

    Attributes:
        codes: int32 [groups, elements of a group].
        scales: fp32 [groups, 1].
        offsets: fp32 [groups, 1], or None where they are zero.
        bits: of a code; signed ones where there are no offsets. Binary tensors with zeros have 2.
        shape, dtype: of the tensor.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    shape: torch.Size
    dtype: torch.dtype

    def values(self) -> Tensor:
        """The tensor; with the bits of `fake_quantize`."""
        return _values(self.codes.float(), self.scales, self.offsets).to(self.dtype).view(self.shape)


class Grouped(Protocol):
    """The groups of a tensor, of which this rank may have a part only.

    What is found of a group has a shape that broadcasts to `values`.

    Attributes:
        values: the elements on this rank, fp32.
    """

    values: Tensor

    def range(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest value of each group."""

    def mean(self, x: Tensor) -> Tensor:
        """The mean of each group, of numbers like `values`."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of each group, of numbers like `values`."""

    def noise(self, key: int) -> Tensor:
        """Numbers of [-1/2, 1/2) like `values`, as `noise_of` the full tensor."""


class _Rows:
    """Groups of a tensor that is full on this rank, as rows [groups, n]; what is found is [groups, 1]."""

    def __init__(self, x: Tensor, groups: int) -> None:
        self.values = x.float().reshape(groups, -1)

    def range(self) -> tuple[Tensor, Tensor]:
        # Along a dim, torch's aminmax takes several times as long as both.
        return self.values.amin(1, keepdim=True), self.values.amax(1, keepdim=True)

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)

    def noise(self, key: int) -> Tensor:
        return noise_of(self.values.shape, key, self.values.device)


def fake_quantize(
    x: Tensor, bits: int, quantizer: Quantizer, key: int | None = None, grouped: Grouped | None = None
) -> Tensor:
    """`x` with values of `bits` bits, and a copied gradient.

    Args:
        x: floats.
        bits: of a code, 1 to 16.
        quantizer: how.
        key: of stochastic rounding: equal keys round alike; None rounds to the nearest.
        grouped: `x` in groups, if it is a part of a tensor; else `x` counts as the rows of the quantizer.

    Raises:
        UsageError: the quantizer does not do that.
    """
    with torch.no_grad():
        grouped = _rows_of(x.detach(), bits, quantizer) if grouped is None else grouped
        codes, scales, offsets = _encode(grouped, bits, quantizer, key)
        found = _values(codes, scales, offsets).to(x.dtype).view(x.shape)
    return copied_gradient(x, found)


def encode(x: Tensor, bits: int, quantizer: Quantizer) -> Codes:
    """The codes of `x`, rounded to the nearest.

    Raises:
        UsageError: the quantizer does not do that.
    """
    with torch.no_grad():
        codes, scales, offsets = _encode(_rows_of(x.detach(), bits, quantizer), bits, quantizer, None)
        codes = codes.to(torch.int32)
        held = 2 if bits == 1 and bool((codes == 0).any()) else bits
    return Codes(codes, scales, offsets, held, x.shape, x.dtype)


def quantize_between(x: Tensor, low: Tensor, high: Tensor, bits: int, quantizer: Quantizer) -> Tensor:
    """`x` quantized with the scale of another tensor's range, and a copied gradient.

    Args:
        x: floats.
        low: least value; it has one element, or broadcasts to `x`.
        high: greatest value, likewise.
        bits: of a code, at least 3.
        quantizer: symmetric or not; groups are not looked at.
    """
    with torch.no_grad():
        scales, offsets = _grid(low.float(), high.float(), bits, quantizer.kind)
        codes = _rounded(x.detach().float(), scales, offsets, bits, None)
        found = _values(codes, scales, offsets).to(x.dtype)
    return copied_gradient(x, found)


class _CopiedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copied_gradient(x: Tensor, value: Tensor) -> Tensor:
    """`value` in forward; its gradient becomes that of `x`, which has the same shape."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value
    found: Tensor = _CopiedGradient.apply(x, value)
    return found


def _rows_of(x: Tensor, bits: int, quantizer: Quantizer) -> Grouped:
    reason = quantizer.reason_against(bits, x.shape)
    if reason:
        msg = f"quantization: {reason}"
        raise UsageError(msg)
    return _Rows(x, quantizer.groups)


def _encode(grouped: Grouped, bits: int, quantizer: Quantizer, key: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as floats, scales, offsets; of full tensors [groups, n], [groups, 1], [groups, 1]."""
    values = grouped.values
    if isinstance(grouped, _Rows) and not values.numel():
        return values, values.new_zeros(quantizer.groups, 1), None
    if bits == 1:
        return values.sign(), grouped.mean(values.abs()), None
    if bits == 2:
        return _ternary(grouped)
    noise = grouped.noise(key) if quantizer.rounding == "stochastic" and key is not None else None
    scales, offsets = _grid(*grouped.range(), bits, quantizer.kind)
    return _rounded(values, scales, offsets, bits, noise), scales, offsets


def _grid(low: Tensor, high: Tensor, bits: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets of rows between these values."""
    if kind == "symmetric":
        return torch.maximum(low.abs(), high.abs()) * 2.0 ** (1 - bits), None
    scales = (high - low) * 2.0**-bits
    # A row of equal values is its offset.
    return scales, torch.where(scales == 0, low, (low / scales).round() * scales)


def _rounded(rows: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, noise: Tensor | None) -> Tensor:
    """Codes, as floats. Those of a row with scale 0 are 0."""
    steps = torch.where(scales == 0, 1.0, scales)
    codes = rows / steps if offsets is None else (rows - offsets).div_(steps)
    if noise is not None:
        codes += noise
    codes.round_()
    if offsets is not None:
        return codes.clamp_(0, 2**bits - 1)
    return codes.clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _values(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Values, in the place of codes that are floats."""
    values = codes.mul_(scales)
    return values if offsets is None else values.add_(offsets)


def _ternary(grouped: Grouped) -> tuple[Tensor, Tensor, None]:
    magnitudes = grouped.values.abs()
    far = (magnitudes > _THRESHOLD * grouped.mean(magnitudes)).float()
    scales = grouped.total(magnitudes.mul_(far)) / grouped.total(far).clamp_(min=1)
    return grouped.values.sign().mul_(far), scales, None


def noise_of(shape: torch.Size, key: int, device: torch.device) -> Tensor:
    """Numbers of [-1/2, 1/2), fp32, a function of the key (and of the kind of device)."""
    generator = torch.Generator(device)
    generator.manual_seed(key % (1 << 63))
    return torch.rand(shape, generator=generator, device=device).sub_(0.5)
