"""The state of this process that a script may change, kept before a trial and put back after it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mpispeed.base import rng
from mpispeed.engine import features
from mpispeed.mesh import comms_log
from mpispeed.mesh.comms_log import Settings
from mpispeed.nn import activation_checkpointing
from mpispeed.tuning.resident import trim

THREAD_SECONDS = 2.0
"""Time for threads of a script to end once it has ended."""


@dataclass(frozen=True, slots=True)
class LoggerState:
    """Level, handlers and switches of one logger."""

    level: int
    handlers: tuple[logging.Handler, ...]
    propagate: bool
    disabled: bool

    @classmethod
    def of(cls, logger: logging.Logger) -> LoggerState:
        """As it is now."""
        return cls(logger.level, tuple(logger.handlers), logger.propagate, logger.disabled)

    def give(self, logger: logging.Logger) -> None:
        """Put it back."""
        logger.setLevel(self.level)
        logger.handlers[:] = self.handlers
        logger.propagate, logger.disabled = self.propagate, self.disabled


@dataclass(slots=True)
class ProcessState:
    """State of this process at one moment.

    `folder` is that of the script: modules from there are imported anew in each trial, those of packages stay.
    """

    folder: Path | None
    words: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    streams: tuple[Any, ...] = field(default_factory=lambda: (sys.stdin, sys.stdout, sys.stderr))
    hooks: tuple[Any, ...] = field(default_factory=lambda: (sys.excepthook, threading.excepthook, sys.displayhook))
    working_folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    modules: dict[str, ModuleType] = field(default_factory=lambda: dict(sys.modules))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    rows: tuple[str, ...] = field(default_factory=lambda: tuple(row.name for row in features.registered()))
    signals: dict[int, Any] = field(default_factory=lambda: {n: signal.getsignal(n) for n in _signals()})
    loggers: dict[str, LoggerState] = field(
        default_factory=lambda: {n: LoggerState.of(x) for n, x in _loggers().items()}
    )
    generators: dict[str, bytes] = field(default_factory=rng.capture)
    comms: Settings = field(default_factory=lambda: comms_log.of_process().settings)
    settings: dict[str, Any] = field(default_factory=lambda: {name: get() for name, (get, _) in _SETTINGS.items()})
    builtins: dict[str, Any] = field(default_factory=lambda: dict(vars(builtins)))

    def restore(self) -> str:
        """Put everything back; returns what could not be, in words, or "".

        Engines and process groups have to be gone. Random generators are set back as well, so that each trial has the
        same numbers.
        """
        self._restore_interpreter()
        for name in [row.name for row in features.registered() if row.name not in self.rows]:
            features.unregister(name)
        activation_checkpointing.unconfigure()
        for name, (_, put) in _SETTINGS.items():
            put(self.settings[name])
        rng.restore(self.generators)
        rng.get_rng_tracker().reset()
        comms_log.of_process().detach()
        comms_log.of_process().settings = self.comms
        _end_children()
        self._forget_modules()
        self._restore_loggers()
        _forget_libraries()
        trim()
        return self._left_over()

    def _restore_interpreter(self) -> None:
        sys.argv[:], sys.path[:] = self.words, self.path
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = self.streams
        sys.excepthook, threading.excepthook, sys.displayhook = self.hooks
        vars(builtins).update(self.builtins)  # some put a print of rank 0 alone there
        os.chdir(self.working_folder)
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        warnings.resetwarnings()
        warnings.filters[:] = self.filters  # type: ignore[index]
        for number, handler in self.signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _restore_loggers(self) -> None:
        """Those of packages that were imported meanwhile stay as their packages have made them."""
        fresh = LoggerState(logging.NOTSET, (), propagate=True, disabled=False)
        for name, logger in _loggers().items():
            top = name.partition(".")[0]
            if name in self.loggers:
                self.loggers[name].give(logger)
            elif top == "__main__" or top not in sys.modules:
                fresh.give(logger)

    def _forget_modules(self) -> None:
        """Let go of modules of the script's own, which a new start would import anew."""
        for name, module in list(sys.modules.items()):
            if name not in self.modules and is_own(module, self.folder):
                del sys.modules[name]

    def _left_over(self) -> str:
        """Threads that keep on running. Those of packages, and those that end with the process, do not count."""
        end = time.monotonic() + THREAD_SECONDS
        while True:
            left = [t for t in threading.enumerate() if t not in self.threads and t.is_alive() and not t.daemon]
            if not left or time.monotonic() > end:
                return f"thread {left[0].name!r} of the script goes on" if left else ""
            time.sleep(0.02)


def is_own(module: object, folder: Path | None) -> bool:
    """True for a module from below the script's folder, without packages that are installed there."""
    file = getattr(module, "__file__", None)
    if folder is None or not isinstance(file, str):
        return False
    path = Path(file)
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts)


@contextmanager
def noted_exits(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Context that notes exit handlers of the script's own; gives a function that calls them now, and drops them.

    Handlers that packages register when they are first imported stay to the end of the process.
    """
    noted: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    register = atexit.register

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        name = sys._getframe(1).f_globals.get("__name__", "")
        if name == "__main__" or is_own(sys.modules.get(name), folder):
            noted.append((function, args, kwargs))
            return function
        return register(function, *args, **kwargs)

    def run() -> None:
        while noted:
            function, args, kwargs = noted.pop()
            with contextlib.suppress(Exception):  # as the interpreter, which goes on with the others
                function(*args, **kwargs)

    atexit.register = note  # type: ignore[assignment]
    try:
        yield run
    finally:
        atexit.register = register


def _signals() -> Sequence[int]:
    return sorted(signal.valid_signals())


def _loggers() -> dict[str, logging.Logger]:
    found = {n: x for n, x in logging.root.manager.loggerDict.items() if isinstance(x, logging.Logger)}
    return {"": logging.root, **found}


def _no_default_device(_: Any) -> None:
    torch.set_default_device(None)  # a mode, of which there is none before


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "device": (lambda: None, _no_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda name: multiprocessing.set_start_method(name, force=True),
    ),
    "collector": (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit),
}
"""Settings of torch and of the interpreter: the ways to read and to set each."""


def _end_children() -> None:
    """End processes of multiprocessing that the script has left, such as workers of its loaders."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(THREAD_SECONDS)
        if child.is_alive():
            child.kill()
            child.join(THREAD_SECONDS)


def _forget_libraries() -> None:
    """Reset what libraries keep for the whole process about the run that was."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        accelerate.AcceleratorState._reset_state(True)
        accelerate.GradientState._reset_state()
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    if transformers is not None:
        transformers.unset_hf_deepspeed_config()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()
