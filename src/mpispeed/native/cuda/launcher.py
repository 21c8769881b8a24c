"""Launches of kernels on torch's device, in torch's primary context and on torch's current stream.

A launch does not wait for the device. On the default stream it goes there; on any other it goes through one stream of
pycuda, which takes no handles of others, with an event on both sides: memory that torch allocates on its stream stays
ordered, so no tensor needs `record_stream`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from mpispeed.base.errors import NativeMissing, UsageError
from mpispeed.base.log import once
from mpispeed.native.cuda import store
from mpispeed.native.cuda.catalog import KERNELS, of_source, sources

_logger = logging.getLogger(__name__)

Size = tuple[int, int, int]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Launcher(Protocol):
    """Runs a kernel of the catalog."""

    def launch(self, kernel: str, grid: Size, threads: Size, *args: Any, shared_bytes: int = 0) -> None:
        """Run `kernel` on `grid` blocks of `threads` threads; pointers are integers, structures packed bytes."""

    @property
    def processors(self) -> int:
        """Multiprocessors of the device, for the size of grids."""


stand_in: Launcher | None = None
"""The launcher of tensors on the host inside `standing_in`."""


@contextmanager
def standing_in(launcher: Launcher) -> Iterator[None]:
    """Give every tensor `launcher`, on the host too: how tests run kernels that were compiled for the host."""
    global stand_in
    before, stand_in = stand_in, launcher
    try:
        yield
    finally:
        stand_in = before


def for_tensor(x: Tensor) -> Launcher | None:
    """The launcher of kernels where `x` is; None if the reference has to run: on the host, or without usable kernels.

    The reason why they are not is logged once for each device.
    """
    if stand_in is not None and x.device.type == "cpu":
        return stand_in
    if x.device.type != "cuda":
        return None
    launcher, reason = _on_device(x.device.index if x.device.index is not None else torch.cuda.current_device())
    if launcher is None:
        once(_logger, logging.WARNING, f"no fused kernels on {x.device}: {reason}; slower torch code runs instead")
    return launcher


@cache
def _on_device(index: int) -> tuple[Launcher | None, str]:
    try:
        return DeviceLauncher(index), ""
    except NativeMissing as error:
        return None, str(error)


def unusable_reason() -> str:
    """Reason why kernels cannot run on the current device; "" if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
    return _on_device(torch.cuda.current_device())[1]


class _Side(threading.local):
    """State of a thread: whether the context is current in it, and its stream of pycuda."""

    is_ready = False
    stream: Any = None
    outer: Any = None


class DeviceLauncher:
    """Kernels of one device.

    Collective over: nothing; the first process of a node that needs a source compiles it, the others wait for that.
    """

    def __init__(self, index: int) -> None:
        """Raises NativeMissing: pycuda cannot be used, or there is no machine code for the device."""
        self._driver = _driver()
        self._lock = threading.Lock()
        self._functions: dict[str, Any] = {}
        self._kept: list[
            Any
        ] = []  # modules and streams are never given back: kernels may be on their way until the end
        self._own = _Side()
        self.index = index
        with torch.cuda.device(index):
            torch.cuda.synchronize(index)  # makes the primary context, which pycuda then shares
            properties = torch.cuda.get_device_properties(index)
            self._processors = int(properties.multi_processor_count)
            self.arch = f"sm_{properties.major}{properties.minor}"
            self._driver.init()
            self._context = self._driver.Device(index).retain_primary_context()
        # For ever: at the end of the interpreter pycuda would detach a context that torch's memory still needs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        # A device without compiler or machine code is found out here, once, not in the middle of a step.
        store.check_available(sources(), self.arch)
        self._load(sources()[0])

    @property
    def processors(self) -> int:
        """Multiprocessors of the device, for the size of grids."""
        return self._processors

    @contextmanager
    def _current(self) -> Iterator[Any]:
        self._context.push()
        try:
            yield self._driver
        finally:
            self._driver.Context.pop()

    def _load(self, source: str) -> None:
        _refuse_capture(f"the kernels of {source} are loaded")
        code = store.machine_code(source, self.arch)
        with self._current() as driver:
            module = driver.module_from_buffer(code)
            self._kept.append(module)
            for kernel in of_source(source):
                function = module.get_function(kernel.name)
                function.prepare(kernel.arguments)
                self._functions[kernel.name] = function

    def _get_ready(self) -> None:
        """A thread of autograd has no context before its first call of the runtime, and a launch needs one."""
        torch.cuda.Event().record(torch.cuda.current_stream(self.index))
        self._own.is_ready = True

    def _make_side(self) -> None:
        """A stream that the legacy default stream does not wait for; one for each thread, which then share nothing."""
        _refuse_capture("a thread launches its first kernel on this kind of stream")
        with self._current() as driver:
            self._own.stream = driver.Stream(_NON_BLOCKING)
        self._own.outer = torch.cuda.ExternalStream(self._own.stream.handle, device=self.index)
        self._kept.append(self._own.stream)

    def launch(self, kernel: str, grid: Size, threads: Size, *args: Any, shared_bytes: int = 0) -> None:
        """Run `kernel` on torch's current stream of this device."""
        if kernel not in self._functions:
            with self._lock:
                if kernel not in self._functions:
                    self._load(KERNELS[kernel].source)
        if torch.cuda.current_device() == self.index and self._own.is_ready:
            self._queue(self._functions[kernel], grid, threads, args, shared_bytes)
            return
        with torch.cuda.device(self.index):
            if not self._own.is_ready:
                self._get_ready()
            self._queue(self._functions[kernel], grid, threads, args, shared_bytes)

    def _queue(self, function: Any, grid: Size, threads: Size, args: tuple[Any, ...], shared_bytes: int) -> None:
        now = torch.cuda.current_stream(self.index)
        if now.cuda_stream == 0:
            function.prepared_async_call(grid, threads, None, *args, shared_size=shared_bytes)
            return
        if self._own.stream is None:
            self._make_side()
        self._own.outer.wait_stream(now)
        function.prepared_async_call(grid, threads, self._own.stream, *args, shared_size=shared_bytes)
        now.wait_stream(self._own.outer)


def _refuse_capture(what: str) -> None:
    """Raise if a graph is being captured: a load would break it with an error that names nothing.

    Raises:
        UsageError: a graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        msg = f"{what} while a CUDA graph is captured; run the same once on that stream before you capture it"
        raise UsageError(msg)


def _driver() -> Any:
    try:
        import pycuda.driver
    except ImportError as error:
        hint = "install mpispeed[cuda]" if isinstance(error, ModuleNotFoundError) else "it was built for another driver"
        msg = f"pycuda cannot be imported ({error}); {hint}"
        raise NativeMissing(msg) from error
    return pycuda.driver
