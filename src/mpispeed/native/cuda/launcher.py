"""Launches of kernels on torch's device, in torch's primary context and on torch's current stream.

A launch does not wait for the device. It goes by `cuLaunchKernel` of the driver that is loaded, onto torch's own
stream, so that memory which torch allocates there stays ordered. What a face launches again and again is kept as a
`Prepared`: a kernel with its grid, its block and its packed arguments, of which only the pointers change.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from mpispeed.base.errors import NativeMissing, UsageError
from mpispeed.base.log import once
from mpispeed.native import status
from mpispeed.native.cuda import store
from mpispeed.native.cuda.catalog import KERNELS, of_source, sources
from mpispeed.native.cuda.compiled import launch as compiled

_logger = logging.getLogger(__name__)

Size = tuple[int, int, int]
Prepared: TypeAlias = "compiled.Launch"
"""A kernel to be launched on the pointers that it is called with: tensors, integers, or None for 0."""

_MOST_KEPT = 4096  # launches; models with ever new shapes make ever new ones


class Launcher(Protocol):
    """Runs a kernel of the catalog.

    Attributes:
        kept: what faces launch again, by keys that begin with a face's name; forgotten when there are too many.
    """

    kept: dict[Any, Any]

    def launch(self, kernel: str, grid: Size, threads: Size, *args: Any, shared_bytes: int = 0) -> None:
        """Run `kernel` on `grid` blocks of `threads` threads; pointers are integers, structures packed bytes."""

    def prepare(
        self, kernel: str, grid: Size, threads: Size, tail: bytes = b"", shared_bytes: int = 0, seed_at: int = -1
    ) -> Prepared:
        """The same for its leading pointers, with all that comes after them packed in `tail`, and a seed in it."""

    @property
    def processors(self) -> int:
        """Multiprocessors of the device, for the size of grids."""


def keep(launcher: Launcher, key: Any, made: Any) -> Any:
    """Keep what was made for `key`, and give it back."""
    if len(launcher.kept) >= _MOST_KEPT:
        launcher.kept.clear()
    launcher.kept[key] = made
    return made


def packed(kernel: str, args: tuple[Any, ...]) -> bytes:
    """All arguments of a kernel as the driver takes them."""
    return struct.pack(KERNELS[kernel].arguments, *args)


def leading_pointers(kernel: str, tail: bytes) -> int:
    """How many pointers the arguments of a kernel begin with, if `tail` is what comes after them.

    Raises:
        ValueError: it has another size than the catalog says.
    """
    arguments = KERNELS[kernel].arguments
    count = len(arguments) - len(arguments.lstrip("P"))
    size = struct.calcsize(arguments) - 8 * count
    if len(tail) != size:
        msg = f"{kernel} takes {size} bytes after its pointers, got {len(tail)}"
        raise ValueError(msg)
    return count


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
    if not x.is_cuda:
        return stand_in if stand_in is not None and x.is_cpu else None
    launcher, reason = _on_device(x.get_device())
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


class DeviceLauncher:
    """Kernels of one device.

    Collective over: nothing; processes of a node that come here at the same time share the compilation of kernels.
    """

    def __init__(self, index: int) -> None:
        """Raises NativeMissing: pycuda or the compiled launcher cannot be used, or there is no machine code for it."""
        status.require("launch")
        self._pycuda = _pycuda()
        self._driver = Driver()
        self._lock = threading.Lock()
        self._functions: dict[str, int] = {}
        self.kept: dict[Any, Any] = {}
        self.index = index
        with torch.cuda.device(index):
            torch.cuda.synchronize(index)  # makes the primary context, which pycuda then shares
            properties = torch.cuda.get_device_properties(index)
            self._processors = int(properties.multi_processor_count)
            self.arch = f"sm_{properties.major}{properties.minor}"
            self._pycuda.init()
            self._context = self._pycuda.Device(index).retain_primary_context()
        # For ever: at the end of the interpreter pycuda would detach a context that torch's memory still needs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        # A device without compiler or machine code is found out here, once, not in the middle of a step; and ranks
        # that come here together compile side by side.
        store.compile_missing(sources(), self.arch)
        with self._current():
            context = self._driver.current_context()
        self._queue = compiled.Queue(
            self._driver.address("cuLaunchKernel"),
            self._driver.address("cuCtxGetCurrent"),
            context,
            torch._C._cuda_getCurrentRawStream,
            index,
            self._entered,
            self._driver.refuse,
        )
        self._load(sources()[0])

    @property
    def processors(self) -> int:
        """Multiprocessors of the device, for the size of grids."""
        return self._processors

    @contextmanager
    def _current(self) -> Iterator[Any]:
        self._context.push()
        try:
            yield self._pycuda
        finally:
            self._pycuda.Context.pop()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """The context current: another device may be, and a thread of autograd has none before it calls the runtime."""
        with torch.cuda.device(self.index):
            torch.cuda.Event().record(torch.cuda.current_stream(self.index))
            yield

    def _load(self, source: str) -> None:
        _refuse_capture(f"the kernels of {source} are loaded")
        code = store.machine_code(source, self.arch)
        with self._current():
            # Never given back: kernels may be on their way until the end. By the driver, as pycuda shows no handles.
            module = self._driver.load(code)
            for kernel in of_source(source):
                self._functions[kernel.name] = self._driver.function(module, kernel.name)

    def _function(self, kernel: str) -> int:
        found = self._functions.get(kernel)
        if found is None:
            with self._lock:
                if kernel not in self._functions:
                    self._load(KERNELS[kernel].source)
                found = self._functions[kernel]
        return found

    def launch(self, kernel: str, grid: Size, threads: Size, *args: Any, shared_bytes: int = 0) -> None:
        """Run `kernel` on torch's current stream of this device."""
        self._queue.run(kernel, self._function(kernel), grid, threads, shared_bytes, packed(kernel, args))

    def prepare(
        self, kernel: str, grid: Size, threads: Size, tail: bytes = b"", shared_bytes: int = 0, seed_at: int = -1
    ) -> Prepared:
        """A launch of `kernel` that goes to the stream which is torch's current one when it is called."""
        pointers = leading_pointers(kernel, tail)
        function = self._function(kernel)
        return compiled.Launch(self._queue, kernel, function, grid, threads, shared_bytes, pointers, tail, seed_at)


class Driver:
    """Functions of `libcuda.so.1`, the one that torch and pycuda have loaded."""

    def __init__(self) -> None:
        """Raises NativeMissing: there is no driver."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            msg = f"libcuda.so.1, the driver of the GPU, cannot be loaded: {error}"
            raise NativeMissing(msg) from error

    def address(self, name: str) -> int:
        """Where a function of the driver begins."""
        found = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        return found or 0

    def current_context(self) -> int:
        """The handle of the context that is current in this thread."""
        return self._handle("cuCtxGetCurrent")

    def load(self, code: bytes) -> int:
        """The handle of a module of machine code, in the current context."""
        return self._handle("cuModuleLoadDataEx", code, 0, None, None)

    def function(self, module: int, name: str) -> int:
        """The handle of a kernel of a module."""
        return self._handle("cuModuleGetFunction", ctypes.c_void_p(module), name.encode())

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver; its result is an error or nothing.

        Raises:
            RuntimeError: the driver refuses; says with which words.
        """
        code = getattr(self._library, name)(*args)
        if code:
            self.refuse(name, code)

    def _handle(self, name: str, *args: Any) -> int:
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *args)
        return out.value or 0

    def refuse(self, what: str, code: int) -> NoReturn:
        """Raise what the code of a call means.

        Raises:
            RuntimeError: always; torch's errors of a device are of this kind too.
        """
        said = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(said))
        msg = f"{what}: the driver says {(said.value or b'nothing').decode()!r} ({code})"
        raise RuntimeError(msg)


def _refuse_capture(what: str) -> None:
    """Raise if a graph is being captured: a load would break it with an error that names nothing.

    Raises:
        UsageError: a graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        msg = f"{what} while a CUDA graph is captured; run the same once before you capture it"
        raise UsageError(msg)


def _pycuda() -> Any:
    try:
        import pycuda.driver
    except ImportError as error:
        hint = "install mpispeed[cuda]" if isinstance(error, ModuleNotFoundError) else "it was built for another driver"
        msg = f"pycuda cannot be imported ({error}); {hint}"
        raise NativeMissing(msg) from error
    return pycuda.driver
