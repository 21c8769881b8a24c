"""Batches ahead: a thread that reads while training computes, and copies to a device beside its work."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mpispeed.base.device import current_stream, follow, mark, module_of, on_stream
from mpispeed.base.tensor_tree import map_tensors, move

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long the end of a loader waits for its thread, which may be within a read that does not come back."""

_DONE = object()


class Ahead:
    """Iterates over items that a thread of its own makes, so many ahead.

    The thread ends with the items, with `close`, or when the object is collected.
    """

    def __init__(self, items: Callable[[Callable[[], bool]], Iterator[Any]], depth: int) -> None:
        """Begin.

        Args:
            items: called in the thread as `items(is_wanted)`; ends soon when `is_wanted()` is False.
            depth: most items that wait.
        """
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_fill, args=(items, self._queue, self._stop), name="mpispeed-data", daemon=True
        )
        self._is_over = False
        self._undo = weakref.finalize(self, _finish, self._thread, self._queue, self._stop)
        self._thread.start()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        item, error = self._queue.get()
        if error is None and item is not _DONE:
            return item
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread; items that wait are dropped. A second call does nothing."""
        self._is_over = True
        self._undo()


def _fill(
    items: Callable[[Callable[[], bool]], Iterator[Any]],
    places: queue.Queue[tuple[Any, BaseException | None]],
    stop: threading.Event,
) -> None:
    last: tuple[Any, BaseException | None] = (_DONE, None)
    try:
        for item in items(lambda: not stop.is_set()):
            places.put((item, None))
            if stop.is_set():
                return
    except BaseException as error:  # it is raised where the items are used
        last = (_DONE, error)
    places.put(last)


def _finish(
    thread: threading.Thread, places: queue.Queue[tuple[Any, BaseException | None]], stop: threading.Event
) -> None:
    stop.set()
    if thread is threading.current_thread():
        return
    deadline = time.monotonic() + END_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        try:
            while True:
                places.get_nowait()  # it may wait for a place
        except queue.Empty:
            thread.join(0.01)
    if thread.is_alive():
        log.warning("a read of training data has not ended for %g s; its thread is left alone", END_SECONDS)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on its way to the device; `arrived` is the event behind its copies."""

    batch: Any
    arrived: Any


class DeviceCopies:
    """Copies batches to a device on one stream of its own, beside the work of the stream that uses them."""

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        """Args: `pins`: copy out of page-locked memory; out of other memory the host waits for the copy."""
        self._device, self._pins = device, pins
        self._stream = module_of(device).Stream(device)

    def send(self, batch: Any) -> Sent:
        """Start to copy; any thread may."""
        with on_stream(self._device, self._stream):
            moved = map_tensors(batch, self._copied)
            return Sent(moved, mark(self._device))

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return x
        if self._pins and not x.is_pinned():
            x = x.pin_memory()
        # Page-locked memory is used again only after the copy: torch's allocator waits for the stream.
        return x.to(self._device, non_blocking=True)

    def receive(self, sent: Sent) -> Any:
        """The batch, for the current stream of this thread; the host does not wait. What moves itself moves now."""
        follow(self._device, sent.arrived)
        stream = current_stream(self._device)

        def used(x: torch.Tensor) -> torch.Tensor:
            if x.device == self._device:
                x.record_stream(stream)
            return x

        return map_tensors(sent.batch, used, lambda batch: move(batch, self._device, is_own=True))
