"""Calls of the model that differ in number between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mpispeed.zero import guard
from mpispeed.zero.frames import Frames
from mpispeed.zero.params import ParamStore


@contextmanager
def uneven_forwards(model: nn.Module) -> Iterator[None]:
    """A time in which ranks may call the engine, or its model, different numbers of times without gradients.

    For generation and evaluation that end earlier on some ranks. Cut parameters need
    `"divergent_modules": "union"` in `zero_optimization`: a rank that has left goes on taking part in gathers until all
    have. Where every parameter is whole, ranks are free anyway.

    Collective over: the data axis, on leaving, where parameters are cut.

    Raises:
        UsageError: parameters are cut, and ranks have to be alike.
    """
    for param in model.parameters():
        keeper = guard.keeper_of(param)
        if isinstance(keeper, ParamStore) and isinstance(keeper.reader, Frames):
            with keeper.reader.uneven():
                yield
            return
    yield
