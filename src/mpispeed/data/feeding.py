"""Feeds: batches of a reader, in the order of requests, by way of workers, a thread that is ahead, and a device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mpispeed.base.device import module_of
from mpispeed.base.tensor_tree import map_tensors, move
from mpispeed.data.prefetch import Ahead, DeviceCopies
from mpispeed.data.reading import Reader, is_end
from mpispeed.data.workers import Workers

AHEAD = 2
"""Batches that are read ahead unless something else is said, where that is done."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Ways of reading batches.

    Attributes:
        workers: processes that read; 0: this one.
        ahead: batches that a thread, or the workers together, read ahead; 0: none but one of each worker.
        keeps_workers: they live from pass to pass, with the data set as it was at first.
        pins: batches are in page-locked memory, from which copies to a device overlap with its work.
        device: of the batches' tensors.
    """

    workers: int
    ahead: int
    keeps_workers: bool
    pins: bool
    device: torch.device


class Feed:
    """Reads batches as `reading` says; one pass at a time keeps workers."""

    def __init__(self, reader: Reader, reading: Reading, state: Callable[[], Any] | None = None) -> None:
        """Args: `state`: of the data set; asked for after each batch that is read ahead in this process."""
        self._reader, self._reading = reader, reading
        self._state = state if reading.ahead and not reading.workers else None
        self._kept: Workers | None = None
        is_far = reading.device.type != "cpu"
        self._copies = DeviceCopies(reading.device, pins=reading.pins) if is_far and reading.ahead else None

    def open(self, requests: Iterable[Any]) -> Generator[tuple[Any, Any], None, None]:
        """The batches of `requests`, of a stream until its end, with the state after them; close it when done.

        Raises:
            DataError: one cannot be read; names the sample.
        """
        reading, source = self._reading, None
        workers, self._kept = self._kept, None
        is_whole = False
        try:
            if reading.workers and workers is None:
                workers = Workers(self._reader, reading.workers, reading.ahead)
            read = self._read(requests, workers)
            if not reading.ahead:
                yield from ((self._handed_out(batch), None) for batch in read(lambda: True))
            else:
                source = Ahead(read, 1 if workers else reading.ahead)
                for batch, state in source:
                    yield (batch if self._copies is None else self._copies.receive(batch)), state
            is_whole = True
        except GeneratorExit:
            is_whole = True
            raise
        finally:
            if source is not None:
                source.close()
            if workers is not None:
                self._end(workers, keeps=is_whole and reading.keeps_workers and self._kept is None)

    def _end(self, workers: Workers, *, keeps: bool) -> None:
        if keeps:
            self._kept = workers
        else:
            workers.close()

    def close(self) -> None:
        """End the workers that are kept; those of a running pass end with it."""
        workers, self._kept = self._kept, None
        if workers is not None:
            workers.close()

    def _read(self, requests: Iterable[Any], workers: Workers | None) -> Callable[[Callable[[], bool]], Iterator[Any]]:
        """What reads: without a reference to this object, because a thread has it."""
        reader, copies, state, is_ahead = self._reader, self._copies, self._state, self._reading.ahead > 0
        pins, selected = self._reading.pins, _selecting(self._reading)

        def batches(is_wanted: Callable[[], bool]) -> Generator[Any, None, None]:
            if workers is not None:
                yield from workers.read(requests, is_wanted, _pinned if pins else torch.Tensor.clone)
                return
            for request in requests:
                batch = reader.read(request)
                if is_end(batch):
                    return
                yield map_tensors(batch, _pinned) if pins and copies is None else batch

        def ahead(is_wanted: Callable[[], bool]) -> Iterator[Any]:
            with selected(), contextlib.closing(batches(is_wanted)) as found:
                for batch in found:
                    after = None if state is None else copy.deepcopy(state())
                    yield (batch if copies is None else copies.send(batch)), after

        return ahead if is_ahead else batches

    def _handed_out(self, batch: Any) -> Any:
        device = self._reading.device
        return batch if device.type == "cpu" else move(batch, device, is_own=True)


def _selecting(reading: Reading) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes a context for another thread, in which page-locked memory belongs to the device of this one."""
    device = reading.device
    if device.type == "cpu" and reading.pins:
        device = torch.device("cuda", torch.cuda.current_device())
    return contextlib.nullcontext if device.type == "cpu" else lambda: module_of(device).device(device)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, or the tensor if it is there, or not in host memory."""
    return x if x.device.type != "cpu" or x.is_pinned() else x.pin_memory()
