"""Weights in the form that they keep: last bits, masked, cut, and packed where codes can hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpispeed.native.packed_codes import MOST_BITS, PackedCodes, pack
from mpispeed.nn.compression.quantizers import Codes, Quantizer, encode, fake_quantize

_NO_CODE = -1


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that goes.

    Attributes:
        zeros: masks in shapes that multiply the weight; where one is False there are zeros.
        keep: dim of the weight -> what stays along it.
    """

    zeros: Sequence[Tensor] = ()
    keep: Mapping[int, Tensor] = field(default_factory=dict)

    def indices(self) -> Iterator[tuple[int, Tensor]]:
        """Dims, and the numbers of what stays along them."""
        for dim, mask in self.keep.items():
            yield dim, mask.nonzero().view(-1)


@torch.no_grad()
def last_weight(weight: Tensor, bits: int, quantizer: Quantizer, cut: Cut) -> tuple[PackedCodes | None, Tensor | None]:
    """The weight that a layer has in the end: as codes, or as values; the tensor itself if nothing changes.

    Args:
        weight: the whole one.
        bits: of a code, of which up to 8 are packed; 0: it is not quantized.
        quantizer: of the whole weight; rounding is to the nearest.
        cut: what goes.
    """
    if 1 <= bits <= MOST_BITS:
        packed = _packed(encode(weight, bits, quantizer), cut)
        if packed is not None:
            return packed, None
    values = fake_quantize(weight, bits, quantizer) if bits else weight
    for mask in cut.zeros:
        values = values * mask
    for dim, index in cut.indices():
        values = values.index_select(dim, index)
    return None, values


def _packed(codes: Codes, cut: Cut) -> PackedCodes | None:
    """Codes of what stays of a tensor, with the scales of the whole one; None if they cannot hold it."""
    integers, scales = codes.codes.view(codes.shape), codes.scales.view(-1)
    offsets = None if codes.offsets is None else codes.offsets.view(-1)
    is_signed = offsets is None
    if not cut.zeros and not cut.keep:
        return pack(integers, codes.bits, scales, offsets, is_signed=is_signed)
    bits, place = codes.bits, torch.arange(len(scales), device=scales.device)
    place = place.repeat_interleave(integers.numel() // max(1, len(scales))).view(codes.shape)
    if cut.zeros:
        gone = torch.stack([~mask.expand_as(integers) for mask in cut.zeros]).any(0)
        zero = _zero_codes(scales, offsets, bits)[place].to(integers.dtype)
        if bool((gone & (zero == _NO_CODE)).any()):
            return None
        integers = torch.where(gone, zero, integers)
        bits = max(bits, 2) if is_signed and bool(gone.any()) else bits
    for dim, index in cut.indices():
        integers, place = integers.index_select(dim, index), place.index_select(dim, index)
    own = _regrouped(place, len(scales))
    if own is None:
        return None
    return pack(integers, bits, scales[own], None if offsets is None else offsets[own], is_signed=is_signed)


def _zero_codes(scales: Tensor, offsets: Tensor | None, bits: int) -> Tensor:
    """For each group the code of zero, `_NO_CODE` where there is none."""
    if offsets is None:
        return torch.zeros_like(scales)
    found = torch.where(scales == 0, 0.0, (-offsets / scales).round())
    is_zero = (found >= 0) & (found < 2**bits) & (found * scales + offsets == 0)
    return torch.where(is_zero, found, float(_NO_CODE))


def _regrouped(place: Tensor, groups: int) -> Tensor | None:
    """The old groups of equal new ones, given that of each element; None if each row or filter is in several."""
    for count in (groups, *place.shape[:1], math.prod(place.shape[:-2])):
        if count and not place.numel() % count:
            rows = place.reshape(count, -1)
            if bool((rows == rows[:, :1]).all()):
                return rows[:, 0]
    return None
