"""Readers: batches of a data set, made wherever they are read: beside training, in its thread or in another process.

A map-style data set is read by the first of these that it has:

- `read_batch(indices)`, if no `collate_fn` is given: a whole batch, which is not collated;
- `__getitems__(indices)`: a list of samples, as torch's loaders read it;
- `__getitem__(index)`, for each sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from mpispeed.base import rng
from mpispeed.base.errors import DataError

Collate = Callable[[list[Any]], Any]

END = "the end of the data"
"""What a `Stream` gives instead of a batch where there is none; compared by identity or, from a worker, by value."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
MOST_SHOWN = 8


class Reader(Protocol):
    """Reads what a request asks for; requests are small plain values."""

    dataset: Any

    def read(self, request: Any) -> Any:
        """A batch.

        Raises:
            DataError: it cannot be read; names the sample.
        """


def has_whole_batches(dataset: Any, collate_fn: Collate | None) -> bool:
    """True if batches are read by one call of `read_batch`."""
    return collate_fn is None and callable(getattr(dataset, "read_batch", None))


class Samples:
    """Reader of a map-style data set; requests are (epoch, indices)."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None, seed: int, *, restores: bool = False) -> None:
        """Make a reader.

        Args:
            dataset: map style.
            collate_fn: makes a batch of samples; None: torch's.
            seed: of random numbers that a worker process draws for a sample.
            restores: this process draws them alike, and has its generators back after each batch.
        """
        self.dataset, self._collate, self._seed = dataset, collate_fn or default_collate, seed
        self._reads_batches = has_whole_batches(dataset, collate_fn)
        self.seeds = restores  # set in worker processes
        self._restores = restores

    def read(self, request: tuple[int, list[int]]) -> Any:
        """As `Reader.read`."""
        with rng.kept() if self._restores else nullcontext():
            return self._read(request)

    def _read(self, request: tuple[int, list[int]]) -> Any:
        epoch, indices = request
        if self._reads_batches:
            return self._whole(epoch, indices)
        items = getattr(self.dataset, "__getitems__", None)
        samples = self._several(items, epoch, indices) if callable(items) else self._each(epoch, indices)
        try:
            return self._collate(samples)
        except Exception as error:
            msg = f"{named(indices)} cannot be made into a batch: {_told(error)}"
            raise DataError(msg) from error

    def _each(self, epoch: int, indices: list[int]) -> list[Any]:
        found = []
        for index in indices:
            self._seed_for(epoch, index)
            try:
                found.append(self.dataset[index])
            except Exception as error:
                msg = f"sample {index} of the data cannot be read: {_told(error)}"
                raise DataError(msg) from error
        return found

    def _several(self, items: Callable[[list[int]], list[Any]], epoch: int, indices: list[int]) -> list[Any]:
        self._seed_for(epoch, indices[0])
        try:
            return items(indices)
        except Exception as error:
            msg = f"{named(indices)} of the data cannot be read: {_told(error)}"
            raise DataError(msg) from error

    def _whole(self, epoch: int, indices: list[int]) -> Any:
        self._seed_for(epoch, indices[0])
        try:
            return self.dataset.read_batch(indices)  # type: ignore[attr-defined]
        except Exception as error:
            msg = f"{named(indices)} of the data cannot be read: {_told(error)}"
            raise DataError(msg) from error

    def _seed_for(self, epoch: int, index: int) -> None:
        """Random numbers of a sample depend on it, the epoch and the seed alone, whichever process reads it."""
        if self.seeds:
            seed_all(self._seed, epoch, index)


def seed_all(*keys: int) -> None:
    """Seed the generators of Python, numpy and torch's host by a mix of integers."""
    word = 0
    for key in keys:
        word = ((word ^ key) * _GOLDEN + 0xD1B54A32D192ED03) & _MASK
        word ^= word >> 29
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word >> 1)


class Stream:
    """Reader of an iterable data set: one rank's slice of each block; requests are (epoch, skip, number).

    `number` counts the blocks of a pass. A pass is opened anew if another one, or another block of it, was read last.

    With `slot_of` the `unit` items of an update are read at once, and slot `i` is the `i`-th micro-batch of them; a
    short last update is filled with its own items.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate_fn: Collate | None,
        *,
        start: int,
        micro_batch: int,
        size: int,
        drop_last: bool,
        slot_of: Callable[[int], int] | None = None,
        unit: int = 0,
    ) -> None:
        self.dataset, self._collate = dataset, collate_fn or default_collate
        self._start, self._micro_batch, self._block, self._drop_last = start, micro_batch, micro_batch * size, drop_last
        self._next: tuple[int, int | None, int] | None = None
        self._items: Iterator[Any] = iter(())
        self._slot_of, self._each = slot_of, 1  # blocks that are read at once
        if slot_of is not None:
            self._each, self._block = unit // self._block, unit
        self._held: list[Any] = []

    def read(self, request: tuple[int, int | None, int]) -> Any:
        """As `Reader.read`; `END` after the last block. `skip` None: the data set is at its place already."""
        epoch, skip, number = request
        turn, within = divmod(number, self._each)
        try:
            if request != self._next:
                self._items = self._opened(epoch, skip)
                for _ in islice(self._items, turn * self._block):
                    pass
            if request != self._next or not within:
                self._held = list(islice(self._items, self._block))
            block = self._held
        except Exception as error:
            msg = f"the data stream cannot be read after item {(skip or 0) + turn * self._block}: {_told(error)}"
            raise DataError(msg) from error
        self._next = (epoch, skip, number + 1)
        if not block or (len(block) < self._block and self._drop_last):
            self._items = iter(())
            return END
        start = self._start if self._slot_of is None else self._slot_of(within) * self._micro_batch
        mine = list(islice(cycle(block), start, start + self._micro_batch))
        try:
            return self._collate(mine)
        except Exception as error:
            msg = f"items of the data stream cannot be made into a batch: {_told(error)}"
            raise DataError(msg) from error

    def _opened(self, epoch: int, skip: int | None) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if skip is not None and hasattr(self.dataset, "seek"):
            self.dataset.seek(skip)
            return iter(self.dataset)
        return islice(iter(self.dataset), skip, None)


def is_end(batch: Any) -> bool:
    """True for the `END` of a stream."""
    return isinstance(batch, str) and batch == END


def named(indices: list[int]) -> str:
    """Words for samples in a message."""
    shown = ", ".join(map(str, indices[:MOST_SHOWN]))
    return f"samples {shown}{', ...' if len(indices) > MOST_SHOWN else ''}"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
