"""Ends a process that was told twice to end and is stuck where Python's signal handlers do not run, in a collective."""

from __future__ import annotations

import os
import signal
import threading
import time

IMPATIENT_SECONDS = 10.0
"""A second SIGTERM counts if it comes so much later than the first: some launchers send each one twice."""

_WATCHING: list[Impatience] = []
"""The instance of this process; the interpreter writes signals to one pipe only."""


class Impatience:
    """Thread that reads signals from the pipe to which the interpreter writes them at once."""

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._thread: threading.Thread | None = None
        self.is_heard = False  # the run is being saved and ends, so it is not stuck and must not be cut short

    def start(self) -> None:
        """Begin, unless something else reads signals this way; only in the main thread."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            self._close()
            return
        if not _WATCHING:
            os.register_at_fork(after_in_child=_let_go)
        _WATCHING[:] = [self]
        self._thread = threading.Thread(target=self._watch, name="mpispeed-impatience", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; only in the main thread."""
        if self._thread is None:
            return
        previous = signal.set_wakeup_fd(-1)
        if previous != self._writer:
            signal.set_wakeup_fd(previous)
        os.write(self._writer, b"\0")
        self._thread.join()
        self._thread = None
        self._close()

    def _close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _watch(self) -> None:
        first = 0.0
        while True:
            numbers = os.read(self._reader, 512)
            if 0 in numbers:
                return
            if signal.SIGTERM not in numbers:
                continue
            now = time.monotonic()
            if first and now - first >= IMPATIENT_SECONDS and not self.is_heard:
                os._exit(128 + signal.SIGTERM)
            first = first or now


def _let_go() -> None:
    """Close the pipe in a child: its signals are not those of its parent."""
    if _WATCHING:
        signal.set_wakeup_fd(-1)
        _WATCHING.clear()
