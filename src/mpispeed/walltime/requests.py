"""Requests to save or to stop: signals and files. They are only noted here; the engine acts between steps."""

from __future__ import annotations

import atexit
import contextlib
import enum
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from mpispeed.walltime.second_sigterm import Impatience

LOADERS, SET_IN_LOADER = "torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers"
"""The flag by which torch's loaders handle SIGTERM in their workers: one not from the parent would end them."""

LOOK_SECONDS = 1.0
"""Least time between two looks for files, which may lie on a file system that many share."""


class Asked(enum.IntEnum):
    """Request that a rank has seen; the greatest of all ranks counts."""

    NOTHING = 0
    SAVE = 1  # the file SAVE: save and go on
    JOB_END = 2
    SIGNAL = 3
    STOP = 4  # the file STOP


class SignalWatch:
    """Notes signals of this process, nothing more; handlers that were installed before still run.

    Processes forked from this one inherit the handlers: they ignore the signals, which their parent handles, but
    SIGTERM ends them, as pools of processes rely on. Only a loader's workers ignore SIGTERM too, lest they die
    before the run is saved, until `restore`. A second SIGTERM, some time after the first, ends this
    process wherever it is, unless the first one is being handled.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = [signal.Signals[f"SIG{name}"] for name in names]
        self._previous: dict[int, Any] = {}
        self._pid = 0
        self._is_watching = mmap.mmap(-1, 1)  # shared with children
        self._impatience = Impatience()
        self._set_in_loader: Callable[..., Any] | None = None
        self._is_loader = False
        self.number = 0  # of the last signal, 0 if there was none

    def install(self) -> bool:
        """Take the signals over; False where Python does not allow it, outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._pid = os.getpid()
        self._is_watching[0] = 1
        atexit.register(self._let_children_go)
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._on_signal)
        if signal.SIGTERM in self._numbers:
            self._shield_loaders()
            self._impatience.start()
        return True

    def take(self) -> None:
        """Note that all ranks know of the request and end the run: another signal changes nothing."""
        self._impatience.is_heard = True

    def restore(self) -> None:
        """Give the signals back, except those that somebody else has taken over since."""
        self._let_children_go()
        atexit.unregister(self._let_children_go)
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                # None: a handler that was not installed from Python, which cannot be put back.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        self._impatience.stop()
        if self._set_in_loader is not None:
            setattr(sys.modules[LOADERS], SET_IN_LOADER, self._set_in_loader)
            self._set_in_loader = None

    @staticmethod
    def name_of(number: int) -> str:
        """Name of a signal as users know it; "" for 0."""
        return signal.Signals(number).name if number else ""

    def _shield_loaders(self) -> None:
        """Let torch's workers install their handlers, but this one for SIGTERM."""
        self._set_in_loader = getattr(sys.modules.get(LOADERS), SET_IN_LOADER, None)
        set_theirs = self._set_in_loader
        if set_theirs is None:
            return

        def set_both(*arguments: Any) -> None:
            set_theirs(*arguments)
            if os.getppid() == self._pid:
                self._is_loader = True
                signal.signal(signal.SIGTERM, self._on_signal)

        setattr(sys.modules[LOADERS], SET_IN_LOADER, set_both)

    def _let_children_go(self) -> None:
        self._is_watching[0] = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._in_child(number)
            return
        self.number = number
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _in_child(self, number: int) -> None:
        is_shielded = self._is_loader and self._is_watching[0] and os.getppid() == self._pid
        if number == signal.SIGTERM and not is_shielded:
            if self._is_loader:
                os._exit(0)  # as torch's own handler does; another status is an error in the parent
            _die_of(number)


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class TouchFiles:
    """The files SAVE and STOP in the folder of a run.

    SAVE is removed when it is served. STOP stays, and stops the jobs that follow too, until a person removes it.
    """

    NAMES: ClassVar = {Asked.STOP: "STOP", Asked.SAVE: "SAVE"}

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._looked_at = float("-inf")
        self._served: dict[Asked, int] = {}  # times of files that could not be removed

    def look(self) -> Asked:
        """The strongest of the files that are there; looks at most once in a second."""
        if self._clock() - self._looked_at < LOOK_SECONDS:
            return Asked.NOTHING
        self._looked_at = self._clock()
        for asked, name in self.NAMES.items():
            try:
                touched = (self.folder / name).stat().st_mtime_ns
            except OSError:
                continue
            if self._served.get(asked) != touched:
                return asked
        return Asked.NOTHING

    def take(self, asked: Asked) -> None:
        """Remove SAVE; if it cannot be removed, it counts again when it is touched again."""
        file = self.folder / self.NAMES[asked]
        with contextlib.suppress(OSError):
            self._served[asked] = file.stat().st_mtime_ns
            if asked is Asked.SAVE:
                file.unlink()
