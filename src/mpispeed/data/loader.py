"""Loaders: a rank's micro-batches of a data set, with one position that the whole data axis shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError
from mpispeed.base.tensor_tree import move
from mpispeed.data.order import BatchOrder, EpochOrder, require_length
from mpispeed.data.sampler import SampleOrder

log = logging.getLogger(__name__)

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class _StreamShare(IterableDataset[list[Any]]):
    """One rank's slice of each block of an iterable data set, as lists of items."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        skip: int | None,  # None: the data set is at its position already
        start: int,
        micro_batch: int,
        size: int,
        drop_last: bool,
    ) -> None:
        super().__init__()
        self._dataset, self._skip, self._start = dataset, skip, start
        self._micro_batch, self._block, self._drop_last = micro_batch, micro_batch * size, drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        items: Iterator[Any]
        if self._skip is not None and hasattr(self._dataset, "seek"):
            self._dataset.seek(self._skip)
            items = iter(self._dataset)
        else:
            items = islice(iter(self._dataset), self._skip, None)
        while block := list(islice(items, self._block)):
            if len(block) < self._block:
                if self._drop_last:
                    return
                block = list(islice(cycle(block), self._block))
            yield block[self._start : self._start + self._micro_batch]


class ShardedLoader:
    """Iterates over the micro-batches of one rank of the data axis.

    Micro-step `k` of an epoch takes `micro_batch * size` consecutive positions of the sample order,
    and rank `r` the `r`-th slice of them. Each rank makes the same number of micro-steps: the last
    block of an epoch is filled up from the beginning of the epoch, or left out with `drop_last`. The
    fill is to a whole multiple of `step_samples` if that is given (the global batch), so that epochs
    and global batches are the same sets of samples however the global batch is split into ranks,
    micro-batches and accumulation; without it the last block of an epoch depends on the split.

    `iter(loader)` goes on at `position` to the end of the epoch; it does not start over. A batch
    counts as consumed when it is handed out, whatever worker processes have prefetched. `len(loader)`
    is the number of micro-batches of a whole epoch; a pass that resumes within an epoch is shorter.

    An `IterableDataset` is read in whole by every rank, which keeps its slice of each block; a short
    last block is filled with its own items. Here `position` counts the items of the current pass. A
    data set may offer `seek(position)`, or `state_dict()` with `load_state_dict(state)` (used without
    worker processes); otherwise items are read and thrown away to resume. `set_epoch(epoch)` is called
    if it exists. One worker process at most reads a stream, because more would break its order.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch: int,
        rank: int,
        size: int,
        seed: int = 1234,
        shuffle: bool = True,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        workers: int = 0,
        pin_memory: bool = False,
        step_samples: int | None = None,
        device: torch.device = HOST,
        order: BatchOrder | None = None,
    ) -> None:
        """Prepare the loader of data rank `rank` of `size`.

        Args:
            dataset: map-style or iterable.
            micro_batch: samples of a batch.
            rank: index on the data axis.
            size: ranks of the data axis.
            seed: of the order.
            shuffle: each epoch anew.
            collate_fn: makes a batch of a list of samples; None: torch's.
            drop_last: leave out a last block that is short.
            workers: processes that read; 0: this one.
            pin_memory: as torch's DataLoader.
            step_samples: samples of a global batch.
            device: of the batches' tensors.
            order: which samples come when, for map-style data, instead of epochs of all samples; seed, shuffle,
                drop_last and step_samples are not used then.

        Raises:
            ConfigError: sizes that do not fit, or a data set that is neither map-style nor iterable.
        """
        _check_sizes(micro_batch, rank, size, workers, step_samples)
        self.dataset, self.micro_batch, self.rank, self.size = dataset, micro_batch, rank, size
        self.drop_last, self.workers, self.pin_memory, self.collate_fn = drop_last, workers, pin_memory, collate_fn
        self.device = device  # of the batches' tensors
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None  # (batch, state) -> batch
        self._is_stream = isinstance(dataset, IterableDataset)
        self._seed = seed
        self._epoch = self._offset = self._loads = 0
        self._is_placed = False  # load_state_dict has put the data set itself at `_offset`
        self.order: BatchOrder | None = None  # of a stream
        if not self._is_stream:
            _require_map_style(dataset)
            unit = step_samples or micro_batch * size
            samples = SampleOrder(len(dataset), seed, shuffle)  # type: ignore[arg-type]
            self.order = order or EpochOrder(
                samples, micro_batch=micro_batch, rank=rank, size=size, unit=unit, drop_last=drop_last
            )
        elif workers > 1:
            log.warning("an iterable data set is read by 1 worker process, not by %d, to keep its order", workers)
            self.workers = 1

    @property
    def position(self) -> int:
        """Samples consumed by the whole data axis; fill-up of an epoch's last block is not counted."""
        return self._position_of(self._offset)

    def _position_of(self, offset: int) -> int:
        return offset if self.order is None else self._epoch * self.order.length + min(offset, self.order.length)

    def _epoch_of(self, position: int) -> int:
        return self._epoch if self.order is None else position // max(1, self.order.length)

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next sample lies, from 0."""
        return self._epoch_of(self.position)

    def __len__(self) -> int:
        """Number of micro-batches of a whole epoch.

        Raises:
            TypeError: the data set is a stream without a length.
        """
        if self.order is None:
            length = len(self.dataset)  # type: ignore[arg-type]
            block = self.micro_batch * self.size
            return length // block if self.drop_last else -(-length // block)
        return self.order.count(self.epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            loads, first, is_empty = self._loads, self._offset, True
            for batch in self._open():
                self._offset += self.micro_batch * self.size
                is_empty = False
                yield self._handed_out(batch)
                if loads != self._loads:
                    break  # a state was loaded meanwhile; go on from there
            else:
                self._epoch, self._offset = self._epoch + 1, 0
                # A state saved right at the end of an epoch leaves nothing of it; begin the next one.
                if not (is_empty and first):
                    return

    def _handed_out(self, batch: Any) -> Any:
        if self.device.type != "cpu":
            batch = move(batch, self.device, is_own=True)
        return batch if self.post_process_func is None else self.post_process_func(batch, self.state_dict())

    def state_dict(self, *, unused_batches: int = 0) -> dict[str, Any]:
        """State for `load_state_dict`; the same on every rank of the data axis.

        Args:
            unused_batches: micro-batches of each rank that were handed out last and are to come again.
        """
        offset = max(0, self._offset - unused_batches * self.micro_batch * self.size)
        position = self._position_of(offset)
        state: dict[str, Any] = {"position": position, "epoch": self._epoch_of(position)}
        if self.order is not None:
            return state | self.order.state_dict(position)
        is_placeable = self.workers == 0 and unused_batches == 0  # the data set knows its present place only
        if is_placeable and hasattr(self.dataset, "load_state_dict") and hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` cannot take `state`; changes nothing.

        Raises:
            ConfigError: the state is of a data set of another length, or of another kind.
        """
        if self.order is None:
            require_length(state, None)
        else:
            self.order.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of samples of a saved state, on any number of ranks; running iterators follow.

        Seed and shuffling are taken from the state, because they define the stream.

        Raises:
            ConfigError: the state is of a data set of another length, or of another kind.
        """
        self.check_state(state)
        self._loads += 1
        if self.order is None:
            self._epoch, self._offset, self._is_placed = state["epoch"], state["position"], False
            restore = getattr(self.dataset, "load_state_dict", None)
            if "dataset" in state and restore is not None:
                restore(state["dataset"])
                self._is_placed = True
            return
        self.order.load_state_dict(state)
        self._epoch, self._offset = divmod(state["position"], max(1, self.order.length))

    def _open(self) -> Iterable[Any]:
        """Open a torch loader over the rest of the epoch."""
        # With a generator of its own torch draws the workers' seed without moving the global state.
        dice = torch.Generator().manual_seed(self._seed + self.position)
        shared: dict[str, Any] = {
            "num_workers": self.workers,
            "collate_fn": self.collate_fn or default_collate,
            # Copies from pageable memory wait for all earlier work of the device.
            "pin_memory": torch.cuda.is_available() and (self.pin_memory or self.device.type == "cuda"),
            "generator": dice,
        }
        if self.order is None:
            return DataLoader(self._open_stream(), batch_size=None, **shared)
        batches = self.order.batches(self._epoch, self._offset)
        return DataLoader(self.dataset, batch_sampler=batches, **shared)

    def _open_stream(self) -> _StreamShare:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        is_placed, self._is_placed = self._is_placed, False
        return _StreamShare(
            self.dataset,  # type: ignore[arg-type]
            skip=None if is_placed else self._offset,
            start=self.rank * self.micro_batch,
            micro_batch=self.micro_batch,
            size=self.size,
            drop_last=self.drop_last,
        )


class RepeatingLoader(Generic[T]):
    """Endless iterator over a loader, started anew whenever it ends; an empty one raises StopIteration."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def _require_map_style(dataset: Any) -> None:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        msg = (
            f"training data of type {type(dataset).__name__} cannot be loaded; give a data set with "
            "__getitem__ and __len__, or a torch.utils.data.IterableDataset"
        )
        raise ConfigError(msg)


def _check_sizes(micro_batch: int, rank: int, size: int, workers: int, step_samples: int | None) -> None:
    if micro_batch < 1 or size < 1 or not 0 <= rank < size or workers < 0:
        msg = (
            f"micro-batch {micro_batch}, rank {rank} of {size} and {workers} workers do not describe a loader; "
            "micro-batch and size start at 1, rank and workers at 0, and rank is below size"
        )
        raise ConfigError(msg)
    if step_samples is not None and (step_samples < 1 or step_samples % (micro_batch * size)):
        msg = (
            f"step_samples {step_samples} is not a multiple of micro_batch {micro_batch} x {size} ranks; "
            "give the global batch size, micro_batch x accumulation x ranks"
        )
        raise ConfigError(msg)
