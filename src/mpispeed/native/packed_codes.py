"""Tensors as packed integers of 1 to 8 bits, with a scale, and maybe an offset, for each of equal groups of neighbours.

An element is code * scale + offset. A tensor of n elements takes ceil(n bits / 8) bytes, and 4 for each scale and each
offset. Groups are equal parts of the flat tensor, as in quantization-aware training with DeepSpeed's `quantize_groups`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.native.weight_codes import WeightCodes

MOST_BITS = 8
_SPAN = 1 << 20  # elements that are unpacked at a time: temporaries stay small. A multiple of 8


def byte_count(numel: int, bits: int) -> int:
    """Bytes of so many codes."""
    return -(-numel * bits // 8)


class PackedCodes(NamedTuple):
    """A packed tensor.

    Attributes:
        shape: of the tensor.
        is_signed: codes are in two's complement, and those of 1 bit are -1 (bit 0) and 1; else they count from 0.

    Shapes:
        codes: [ceil(numel * bits / 8)] in uint8, one code after the other, each with its lowest bit first
        scales: [groups] in fp32; groups divide the number of elements
        offsets: as scales, or None
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    shape: tuple[int, ...]
    is_signed: bool

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def integers(self) -> Tensor:
        """The codes. Shapes: [numel] in int16."""
        return _unpack(self.codes, self.bits, self.numel, is_signed=self.is_signed)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The tensor: in fp32, then rounded to `dtype`."""
        out = torch.empty(self.numel, dtype=dtype, device=self.codes.device)
        length = self.numel // max(1, self.scales.numel())
        for first in range(0, self.numel, _SPAN):
            last = min(first + _SPAN, self.numel)
            own = self.codes[first * self.bits // 8 : byte_count(last, self.bits)]
            part = _unpack(own, self.bits, last - first, is_signed=self.is_signed).float()
            group, end = first // length, -(-last // length)
            counts = (torch.arange(group, end + 1, device=own.device) * length).clamp(first, last).diff()
            part *= self.scales[group:end].repeat_interleave(counts)
            if self.offsets is not None:
                part += self.offsets[group:end].repeat_interleave(counts)
            out[first:last] = part
        return out.view(self.shape)

    def check(self) -> str:
        """What is wrong with sizes and dtypes, for codes that were read; "" if nothing is."""
        groups = self.scales.numel()
        if not 1 <= self.bits <= MOST_BITS:
            return f"codes of {self.bits} bits; expected 1 to {MOST_BITS}"
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != (byte_count(self.numel, self.bits),):
            wanted = byte_count(self.numel, self.bits)
            return f"codes in {self.codes.dtype} {tuple(self.codes.shape)}; {self.shape} needs {wanted} bytes in uint8"
        if self.scales.dim() != 1 or self.numel % max(1, groups) or (self.numel and not groups):
            return f"scales of shape {tuple(self.scales.shape)}, which are no groups of {self.shape}"
        offsets = self.scales if self.offsets is None else self.offsets
        if {self.scales.dtype, offsets.dtype} != {torch.float32} or offsets.shape != self.scales.shape:
            return f"scales in {self.scales.dtype} and offsets in {offsets.dtype}; expected fp32, of one shape"
        return ""

    def as_matrix(self) -> WeightCodes | None:
        """The same codes for products that read them directly, without a copy; None if there are none.

        Such are signed codes of 8 or 4 bits of a matrix whose rows are in one group each.
        """
        if len(self.shape) != 2 or self.bits not in (4, 8) or not self.is_signed or self.offsets is not None:
            return None
        rows, width = self.shape
        groups = self.scales.numel()
        if not rows or not groups or rows % groups or (self.bits == 4 and width % 2):
            return None
        codes = self.codes.view(torch.int8 if self.bits == 8 else torch.uint8).view(rows, -1)
        return WeightCodes(codes, self.scales.repeat_interleave(rows // groups).view(-1, 1), None, width, width)


@torch.no_grad()
def pack(
    codes: Tensor, bits: int, scales: Tensor, offsets: Tensor | None = None, *, is_signed: bool = True
) -> PackedCodes:
    """Pack integers, given in any dtype.

    Args:
        codes: as `PackedCodes.integers` gives them back, in the shape of the tensor.
        bits: of a code, 1 to 8.
        scales: one for each group.
        offsets: as scales.
        is_signed: see `PackedCodes`.

    Raises:
        ValueError: a code needs more bits, or groups do not divide the tensor.
    """
    flat = codes.reshape(-1)
    low, high = _range(bits, is_signed=is_signed)
    if flat.numel() and (flat.min() < low or flat.max() > high):
        msg = f"pack: codes from {flat.min().item()} to {flat.max().item()}; {bits} bits hold {low} to {high}"
        raise ValueError(msg)
    if bits == 1 and is_signed and bool((flat == 0).any()):
        msg = "pack: a code is 0; signed codes of 1 bit are -1 and 1"
        raise ValueError(msg)
    packed = torch.empty(byte_count(flat.numel(), bits), dtype=torch.uint8, device=flat.device)
    for first in range(0, flat.numel(), _SPAN):
        part = flat[first : first + _SPAN].to(torch.int64)
        part = (part + 1) >> 1 if bits == 1 and is_signed else part & ((1 << bits) - 1)
        packed[first * bits // 8 : byte_count(first + part.numel(), bits)] = _joined(part, bits)
    offsets = None if offsets is None else offsets.reshape(-1).float()
    made = PackedCodes(packed, scales.reshape(-1).float(), offsets, bits, tuple(codes.shape), is_signed)
    if problem := made.check():
        msg = f"pack: {problem}"
        raise ValueError(msg)
    return made


def _range(bits: int, *, is_signed: bool) -> tuple[int, int]:
    """The least and the greatest code."""
    if not is_signed:
        return 0, (1 << bits) - 1
    return (-1, 1) if bits == 1 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _joined(part: Tensor, bits: int) -> Tensor:
    """Bytes of unsigned codes in int64: eight codes are `bits` bytes."""
    missing = -part.numel() % 8
    rows = torch.nn.functional.pad(part, (0, missing)).view(-1, 8)
    words = (rows << (torch.arange(8, device=part.device) * bits)).sum(1)  # of 64 bits at most: no two share one
    made = (words[:, None] >> (torch.arange(bits, device=part.device) * 8)) & 255
    return made.to(torch.uint8).view(-1)[: byte_count(part.numel(), bits)]


def _unpack(packed: Tensor, bits: int, count: int, *, is_signed: bool) -> Tensor:
    """Codes [count] in int16. The first begins at a full byte."""
    if 8 % bits == 0:
        wide = packed.to(torch.int16)[:, None]
        shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.int16)
    else:
        rows = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits).to(torch.int64)
        wide = (rows << (torch.arange(bits, device=packed.device) * 8)).sum(1, keepdim=True)
        shifts = torch.arange(8, device=packed.device) * bits
    codes = ((wide >> shifts) & ((1 << bits) - 1)).to(torch.int16).view(-1)[:count]
    if not is_signed:
        return codes
    half = 1 << (bits - 1)
    return codes * 2 - 1 if bits == 1 else (codes ^ half) - half
