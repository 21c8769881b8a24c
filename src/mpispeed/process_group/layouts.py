"""Tensors of any layout for verbs that take contiguous ones, and narrow floats for sums that need wider ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_NARROW = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
"""Summed in fp32 and rounded once."""


def is_plain(x: torch.Tensor) -> bool:
    """True if the verbs take `x` as it is."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def plain(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy with the same values."""
    return x if is_plain(x) else x.resolve_conj().resolve_neg().contiguous()


@contextmanager
def filled(x: torch.Tensor, *, keeps: bool = False) -> Iterator[torch.Tensor]:
    """A contiguous tensor in place of `x`, copied to it at the end; it starts with its values if it `keeps` them."""
    if is_plain(x):
        yield x
        return
    copy = plain(x) if keeps else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    yield copy
    x.copy_(copy)


@contextmanager
def reducible(x: torch.Tensor, *, is_wide: bool = False) -> Iterator[torch.Tensor]:
    """A contiguous tensor of a dtype that can be summed with the values of `x`, copied to it at the end.

    `is_wide` asks for fp32 also where `x` is of 16 bits.
    """
    if x.dtype not in _NARROW and not (is_wide and x.is_floating_point() and x.itemsize == 2):
        with filled(x, keeps=True) as copy:
            yield copy
        return
    copy = x.to(torch.float32).contiguous()
    yield copy
    x.copy_(copy)


def summable(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy of a dtype that can be summed."""
    return x.to(torch.float32).contiguous() if x.dtype in _NARROW else plain(x)


def is_even(tensors: Sequence[torch.Tensor]) -> bool:
    """True if all have the same number of elements and one dtype and device."""
    first = tensors[0]
    return all(t.numel() == first.numel() and t.dtype == first.dtype and t.device == first.device for t in tensors)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all of them in one tensor; without a copy if they follow each other in memory."""
    found = as_one(tensors)
    return torch.cat([plain(x).reshape(-1) for x in tensors]) if found is None else found


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A flat view of tensors that follow each other in one storage; None if they do not."""
    first, count, base = tensors[0], 0, tensors[0].untyped_storage().data_ptr()
    for x in tensors:
        follows = x.data_ptr() == first.data_ptr() + count * first.itemsize
        if not (follows and is_plain(x) and x.dtype == first.dtype and x.untyped_storage().data_ptr() == base):
            return None
        count += x.numel()
    return first.detach().as_strided((count,), (1,), first.storage_offset())


@contextmanager
def parts(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """One flat tensor to be filled with the elements of all of them, copied to them at the end where it is no view."""
    found = as_one(tensors)
    if found is not None:
        yield found
        return
    flat = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    yield flat
    for x, piece in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(piece.view(x.shape))
