"""Dropout in sliced regions: different masks on every rank there, equal ones over the group elsewhere.

A sliced region seeds a stream of its own from one number of the default stream and the rank in the slicing group. So
the default streams of the group stay equal, and recomputation that restores the default stream, as by
`torch.utils.checkpoint`, gets the same masks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mpispeed.base.rng import capture_torch, restore_torch, seed_torch

_GOLDEN = 0x9E3779B97F4A7C15  # spreads ranks over the seeds (2**64 divided by the golden ratio)


@contextlib.contextmanager
def own_stream(rank: int) -> Iterator[None]:
    """Context that draws different numbers on the ranks of a group; uses one number of the default stream."""
    base = int(torch.randint(2**62, ()).item())
    before = capture_torch()
    seed_torch((base + (rank + 1) * _GOLDEN) % 2**63)
    try:
        yield
    finally:
        restore_torch(before)


class OwnStream:
    """Mixin of a module whose forward is a sliced region: it draws from `own_stream`."""

    _slice_rank: int
    _after: nn.ModuleList

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, then the dropouts that belong behind the region."""
        if not self.training:  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with own_stream(self._slice_rank):
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        for dropout in self._after:
            out = (dropout(out[0]), *out[1:]) if isinstance(out, tuple) else dropout(out)
        return out


@functools.cache
def _with_own_stream(kind: Any) -> Any:
    # A class instead of a wrapped method: copies of the model then call their own forward.
    return type(kind.__name__, (OwnStream, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def give_own_stream(module: nn.Module, rank: int, after: tuple[str, ...] = ()) -> None:
    """Let a module's forward draw from `own_stream`.

    Args:
        module: changed in place.
        rank: in the slicing group.
        after: names of its dropouts that belong behind the sliced region; they are applied to the output.
    """
    kind: Any = type(module)
    module.__class__ = _with_own_stream(kind)
    moved = nn.ModuleList()
    for name in after:
        found = module._modules.get(name)
        if found is not None:
            moved.append(found)
            module._modules[name] = nn.Identity()
    module._modules["_after"] = moved
    module.__dict__["_slice_rank"] = rank


class Region:
    """Flag set by hooks between column- and row-parallel layers; after an error it is soon reset."""

    def __init__(self) -> None:
        self.is_inside = False

    def enter(self, *_: Any) -> None:
        """Mark the begin, behind a column-parallel layer."""
        self.is_inside = True

    def leave(self, *_: Any) -> None:
        """Mark the end, before a row-parallel layer, and before the module that has both."""
        self.is_inside = False


class SplitDropout(nn.Dropout):
    """A dropout that serves inside and outside of a sliced region."""

    def __init__(self, like: nn.Dropout, region: Region, rank: int) -> None:
        super().__init__(like.p, like.inplace)
        self.region, self.slice_rank = region, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With masks of this rank, or with those of the whole group."""
        if not (self.training and self.region.is_inside):
            return super().forward(x)
        with own_stream(self.slice_rank):
            return super().forward(x)


def has_dropout(module: nn.Module, without: tuple[str, ...] = ()) -> bool:
    """True if the module's forward drops anything in training."""
    inside = (part for name, part in module.named_modules() if name not in without)
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in inside) or bool(
        functional_dropouts(module)
    )


def functional_dropouts(module: nn.Module) -> list[str]:
    """Names of attributes that look like the probability of a dropout without a module."""
    return [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float) and value > 0]
