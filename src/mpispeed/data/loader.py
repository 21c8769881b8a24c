"""Loaders: a rank's micro-batches of a data set, with one position that the whole data axis shares."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError
from mpispeed.data.feeding import AHEAD, Feed, Reading
from mpispeed.data.order import BatchOrder, EpochOrder, require_length
from mpispeed.data.reading import Collate, Samples, Stream, has_whole_batches
from mpispeed.data.sampler import SampleOrder
from mpispeed.data.stalls import Waits

log = logging.getLogger(__name__)

T = TypeVar("T")


class ShardedLoader:
    """Iterates over the micro-batches of one rank of the data axis.

    Micro-step `k` of an epoch takes `micro_batch * size` consecutive positions of the sample order,
    and rank `r` the `r`-th slice of them. Each rank makes the same number of micro-steps: the last
    block of an epoch is filled up from the beginning of the epoch, or left out with `drop_last`. The
    fill is to a whole multiple of `step_samples` if that is given (the global batch), so that epochs
    and global batches are the same sets of samples however the global batch is split into ranks,
    micro-batches and accumulation; without it the last block of an epoch depends on the split.

    `iter(loader)` goes on at `position` to the end of the epoch; it does not start over. A batch
    counts as consumed when it is handed out, whatever was read ahead. `len(loader)` is the number
    of micro-batches of a whole epoch; a pass that resumes within an epoch is shorter.

    How a map-style data set is read, by batches or by samples, is said in `data/reading.py`. Random
    numbers that a worker process draws for a sample depend on the seed, the epoch and the sample.

    An `IterableDataset` is read in whole by every rank, which keeps its slice of each block; a short
    last block is filled with its own items. Here `position` counts the items of the current pass. A
    data set may offer `seek(position)`, or `state_dict()` with `load_state_dict(state)` (used without
    worker processes); otherwise items are read and thrown away to resume. `set_epoch(epoch)` is called
    if it exists. One worker process at most reads a stream, because more would break its order.

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
        prefetch: batches read ahead, without workers by a thread; None: 2 with workers or if the data set has
            `read_batch`, else 0: samples may be made with the random numbers of the model.
        persistent_workers: workers stay from pass to pass, with the data set as it was at first.
        pin_memory: batches are in page-locked memory; None: if they go to a GPU.
        step_samples: samples of a global batch.
        device: of the batches' tensors.
        order: which samples come when, for map-style data, instead of epochs of all samples; seed, shuffle,
            drop_last and step_samples are not used then.
        waits: counts the time that is waited for batches.
        slot_of: the slot of this rank in each micro-step of a global batch of `step_samples`, as in `EpochOrder`. Then
            what is drawn for a sample depends on seed, epoch and sample in this process too, which reads without
            being ahead, unless whole batches are read by `read_batch`.
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
        prefetch: int | None = None,
        persistent_workers: bool = False,
        pin_memory: bool | None = None,
        step_samples: int | None = None,
        device: torch.device = HOST,
        order: BatchOrder | None = None,
        waits: Waits | None = None,
        slot_of: Callable[[int], int] | None = None,
    ) -> None:
        """Prepare the loader of data rank `rank` of `size`.

        Raises:
            ConfigError: sizes that do not fit, or a data set that is neither map-style nor iterable.
        """
        _check_sizes(micro_batch, rank, size, workers, prefetch, step_samples)
        self.dataset, self.micro_batch, self.rank, self.size = dataset, micro_batch, rank, size
        self.drop_last, self.device = drop_last, device
        self._slot_of, self._unit = slot_of, step_samples or micro_batch * size
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None  # (batch, state) -> batch
        self._epoch = self._offset = self._loads = 0
        self._is_placed = False  # load_state_dict has put the data set itself at `_offset`
        self._stream_state: Any = None  # of the data set, after the batch that was handed out last
        self._waits = waits or Waits()
        self._lock = threading.Lock()  # of the order, which a thread asks for batches while this one asks for its state
        self._pass: Callable[[], Any] = lambda: None  # a weak reference to the running one
        self.order: BatchOrder | None = None  # of a stream
        if isinstance(dataset, IterableDataset):
            workers = _workers_of_stream(workers)
        else:
            _require_map_style(dataset)
            samples = SampleOrder(len(dataset), seed, shuffle)  # type: ignore[arg-type]
            self.order = order or EpochOrder(
                samples, micro_batch=micro_batch, rank=rank, size=size, unit=self._unit, drop_last=drop_last,
                slot_of=slot_of,
            )  # fmt: skip
        self.workers = workers
        is_drawing = not workers and not has_whole_batches(dataset, collate_fn)  # samples may draw in this process
        if prefetch is None:
            prefetch = 0 if is_drawing else AHEAD
        if slot_of is not None and is_drawing and prefetch:
            raise ConfigError(_AHEAD_OF_SLOTS.format(prefetch))
        pins = torch.cuda.is_available() and (device.type == "cuda" if pin_memory is None else pin_memory)
        reading = Reading(workers, prefetch, keeps_workers=persistent_workers, pins=pins, device=device)
        state = getattr(dataset, "state_dict", None) if self.order is None else None
        self._feed = Feed(self._make_reader(collate_fn, seed), reading, state)

    def _make_reader(self, collate_fn: Collate | None, seed: int) -> Samples | Stream:
        if self.order is not None:
            # What reads whole batches may be a thread, which must not touch the generators of the model.
            restores = self._slot_of is not None and not has_whole_batches(self.dataset, collate_fn)
            return Samples(self.dataset, collate_fn, seed, restores=restores)
        return Stream(
            self.dataset,  # type: ignore[arg-type]
            collate_fn,
            start=self.rank * self.micro_batch,
            micro_batch=self.micro_batch,
            size=self.size,
            drop_last=self.drop_last,
            slot_of=self._slot_of,
            unit=self._unit,
        )

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
            unit = block if self._slot_of is None else self._unit
            return (length // unit if self.drop_last else -(-length // unit)) * (unit // block)
        return self.order.count(self.epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            loads, first, is_empty = self._loads, self._offset, True
            batches = self._feed.open(self._requests())
            self._pass = weakref.ref(batches)
            try:
                for batch, state in self._waits.timed(batches):
                    self._offset += self.micro_batch * self.size
                    self._stream_state, is_empty = state, False
                    yield batch if self.post_process_func is None else self.post_process_func(batch, self.state_dict())
                    if loads != self._loads:
                        break  # a state was loaded meanwhile; go on from there
                else:
                    if is_empty and not first and self.order is not None:
                        return  # the order is at its end, and so is the position
                    self._epoch, self._offset, self._stream_state = self._epoch + 1, 0, None
                    # A state saved right at the end of an epoch leaves nothing of it; begin the next one.
                    if not (is_empty and first):
                        return
            finally:
                batches.close()

    def _requests(self) -> Iterable[tuple[Any, ...]]:
        """What is to be read for the rest of the epoch, in small plain values."""
        epoch = self._epoch
        if self.order is not None:
            return _locked(self._lock, ((epoch, indices) for indices in self.order.batches(epoch, self._offset)))
        skip, self._is_placed = None if self._is_placed else self._offset, False
        if self._slot_of is None or skip is None:
            return ((epoch, skip, number) for number in count())
        within = skip % self._unit  # an update is read at once, also where only its end is left to be handed out
        return ((epoch, skip - within, number) for number in count(within // (self.micro_batch * self.size)))

    def close(self) -> None:
        """End what reads ahead: its thread and processes; iterating again begins anew at `position`."""
        self._end_pass()
        self._feed.close()

    def _end_pass(self) -> None:
        running = self._pass()
        if running is not None:
            running.close()
        self._loads += 1  # an iterator of the pass opens another one

    def state_dict(self, *, unused_batches: int = 0) -> dict[str, Any]:
        """State for `load_state_dict`; the same on every rank of the data axis.

        Args:
            unused_batches: micro-batches of each rank that were handed out last and are to come again.
        """
        offset = max(0, self._offset - unused_batches * self.micro_batch * self.size)
        position = self._position_of(offset)
        state: dict[str, Any] = {"position": position, "epoch": self._epoch_of(position)}
        if self.order is not None:
            with self._lock:
                return state | self.order.state_dict(position)
        is_placeable = self.workers == 0 and unused_batches == 0  # the data set knows its present place only
        if is_placeable and hasattr(self.dataset, "load_state_dict") and hasattr(self.dataset, "state_dict"):
            state["dataset"] = self.dataset.state_dict() if self._stream_state is None else self._stream_state
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
        self._end_pass()  # a thread may read from the data set
        self._stream_state = None
        if self.order is None:
            self._epoch, self._offset, self._is_placed = state["epoch"], state["position"], False
            restore = getattr(self.dataset, "load_state_dict", None)
            if "dataset" in state and restore is not None:
                self._feed.close()  # workers that stay have the data set as it was
                restore(state["dataset"])
                self._is_placed = True
            return
        self.order.load_state_dict(state)
        self._epoch, self._offset = divmod(state["position"], max(1, self.order.length))


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


def _locked(lock: threading.Lock, items: Iterator[T]) -> Iterator[T]:
    """The items, each made under the lock."""
    while True:
        with lock:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


_AHEAD_OF_SLOTS = (
    'reduction "invariant": data_loader.prefetch {} without workers reads samples in a thread, beside the model, and '
    "what they draw would come from the generators of the model; set data_loader.workers, or leave prefetch out"
)


def _workers_of_stream(workers: int) -> int:
    if workers > 1:
        log.warning("an iterable data set is read by 1 worker process, not by %d, to keep its order", workers)
    return min(workers, 1)


def _require_map_style(dataset: Any) -> None:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        msg = (
            f"training data of type {type(dataset).__name__} cannot be loaded; give a data set with "
            "__getitem__ and __len__, or a torch.utils.data.IterableDataset"
        )
        raise ConfigError(msg)


def _check_sizes(
    micro_batch: int, rank: int, size: int, workers: int, prefetch: int | None, step_samples: int | None
) -> None:
    if micro_batch < 1 or size < 1 or not 0 <= rank < size or workers < 0 or (prefetch or 0) < 0:
        msg = (
            f"micro-batch {micro_batch}, rank {rank} of {size}, {workers} workers and {prefetch} batches ahead do not "
            "describe a loader; micro-batch and size start at 1, all others at 0, and rank is below size"
        )
        raise ConfigError(msg)
    if step_samples is not None and (step_samples < 1 or step_samples % (micro_batch * size)):
        msg = (
            f"step_samples {step_samples} is not a multiple of micro_batch {micro_batch} x {size} ranks; "
            "give the global batch size, micro_batch x accumulation x ranks"
        )
        raise ConfigError(msg)
