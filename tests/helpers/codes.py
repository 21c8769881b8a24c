"""Numbers for coders of both kinds, unaligned places for them, and equality of bits."""

from __future__ import annotations

import math

import torch

from mpispeed.native.codes import Coded

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def plain(count, dtype=torch.float32, seed=0):
    """Normal numbers, block by block of another size, with zeros of both signs among them."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(count // 256 + 1, generator=source)).repeat_interleave(256)[:count]
    x = torch.randn(count, generator=source) * sizes
    x[::7], x[3::11] = 0.0, -0.0
    return x.to(dtype)


def wild(count, dtype=torch.float32, seed=1, special=0.002):
    """Any bit patterns: denormals, huge values, and a few infinities and NaNs."""
    source = torch.Generator().manual_seed(seed)
    width = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(width)
    x = torch.randint(info.min, info.max, (count,), generator=source, dtype=torch.int64).to(width).view(dtype)
    return torch.where(x.isfinite() | (torch.rand(count, generator=source) < special), x, 1.0).to(dtype)


def tiny(count, dtype=torch.float32, seed=2):
    """Blocks of 256 around the smallest numbers there are: denormals, zeros, the edge of what has a scale."""
    source = torch.Generator().manual_seed(seed)
    powers = torch.randint(-149, -100, (count // 256 + 1,), generator=source).repeat_interleave(256)[:count]
    return torch.ldexp(torch.randn(count, generator=source), powers).to(dtype)


def ties(count, dtype=torch.float32, seed=3, powers=(-126, 100)):
    """Quotients at and around halves of a level, under scales of any size and mantissa."""
    source = torch.Generator().manual_seed(seed)
    blocks = count // 256 + 1
    scale = torch.exp2(torch.randint(*powers, (blocks,), generator=source)) * (1 + torch.rand(blocks, generator=source))
    level = torch.randint(-253, 254, (count,), generator=source) / 2
    level = level.clamp(-127, 127)
    level[::256] = 127.0
    nudge = torch.randint(-2, 3, (count,), generator=source, dtype=torch.int32)
    nudge[::256] = 0
    x = level * scale.repeat_interleave(256)[:count]
    return (x.view(torch.int32) + nudge).view(torch.float32).to(dtype)


def bytes_of(count, seed=2):
    """Random bytes for `count` signs."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (-(-count // 8),), generator=source, dtype=torch.uint8)


def shifted(x, offset, device="cpu"):
    """The same numbers, starting `offset` elements into their storage, with more behind them."""
    room = torch.full((x.numel() + offset + 3,), 77, dtype=x.dtype, device=device)
    room[offset : offset + x.numel()] = x.to(device)
    return room[offset : offset + x.numel()]


def untouched(x, offset):
    """Whether what lies beside a result of `shifted` is as it was."""
    room = torch.as_strided(x, (x.numel() + offset + 3,), (1,), x.storage_offset() - offset)
    return bool((room[:offset] == 77).all() and (room[offset + x.numel() :] == 77).all())


def dirty(grid, bits, offset=0, device="cpu"):
    """Codes that are to be overwritten."""
    coded = Coded.zeros(grid, bits)
    return Coded(*(shifted(x.fill_(85), offset, device) for x in coded))


def moved(coded, offset=0, device="cpu"):
    """A copy of a code."""
    return Coded(*(shifted(x, offset, device) for x in coded))


def same(a, b):
    """Equal bits; NaNs may differ in sign and payload."""
    a, b = a.cpu(), b.cpu()
    both_nan = a.isnan() & b.isnan()
    width = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return a.dtype == b.dtype and bool((both_nan | (a.view(width) == b.view(width))).all())


def same_coded(a, b):
    """Equal codes, and scales of equal bits."""
    return torch.equal(a.codes.cpu(), b.codes.cpu()) and same(a.scales, b.scales)


def same_sum(a, b):
    """Equal exact sums of two lists of squares."""
    ours, theirs = math.fsum(a), math.fsum(b)
    return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
