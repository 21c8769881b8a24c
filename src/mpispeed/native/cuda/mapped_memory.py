"""Memory of a GPU mapped by several processes (CUDA IPC), by calls of the driver; also of ranks that share the GPU.

Source: CUDA driver API, unified addressing and interprocess communication (cuIpcGetMemHandle and its neighbours).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda.launcher import Driver
from mpispeed.native.mapped_memory import HANDLE_BYTES, Mapper, Signal, tensor_at

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the memory may be another GPU's


class _MemoryHandle(ctypes.Structure):
    """A `CUipcMemHandle`, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaSignal(Signal):
    """An event between processes."""

    def __init__(self, device: torch.device, event: Any, handle: bytes) -> None:
        self._device, self._event, self.handle = device, event, handle

    def set(self) -> None:
        """Record the event on the current stream."""
        self._event.record(torch.cuda.current_stream(self._device))

    def follow(self) -> None:
        """Let the current stream wait for the event."""
        self._event.wait(torch.cuda.current_stream(self._device))


class CudaMapper(Mapper):
    """Memory from cuMemAlloc, outside of torch's pool, of which no part could be exported alone.

    What another process has made is named as memory of this process's own GPU, wherever it is: kernels and copies
    reach it by its address.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises NativeMissing: there is no driver of CUDA, as on GPUs of other makers."""
        super().__init__(device)
        if torch.version.hip is not None:
            msg = "memory of AMD GPUs is not mapped by other processes here"
            raise NativeMissing(msg)
        self._driver = Driver()
        self._own: list[int] = []
        self._opened: list[int] = []

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context of the device current in this thread."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream(self.device).query()  # a thread has no context before it calls the runtime
            yield

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """CuMemAlloc and cuIpcGetMemHandle. Shapes: [nbytes]."""
        with self._current():
            address, handle = ctypes.c_uint64(), _MemoryHandle()
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            self._own.append(address.value)
            self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            return tensor_at(address.value, nbytes, self.device), bytes(handle)

    def open(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """CuIpcOpenMemHandle. Shapes: [nbytes]."""
        with self._current():
            address = ctypes.c_uint64()
            given = _MemoryHandle.from_buffer_copy(handle)
            self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_PEER_ACCESS))
            self._opened.append(address.value)
            return tensor_at(address.value, nbytes, self.device)

    def make_signal(self) -> CudaSignal:
        """An event that others can open."""
        with self._current():
            event = torch.cuda.Event(interprocess=True)
            return CudaSignal(self.device, event, bytes(event.ipc_handle()))

    def open_signal(self, handle: bytes) -> CudaSignal:
        """The event of another process."""
        with self._current():
            return CudaSignal(self.device, torch.cuda.Event.from_ipc_handle(self.device, handle), handle)

    def let_go(self) -> None:
        """CuIpcCloseMemHandle of all that was opened, after the device has done its work."""
        torch.cuda.synchronize(self.device)
        with self._current():
            while self._opened:
                self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))

    def free(self) -> None:
        """CuMemFree of all that was allocated."""
        with self._current():
            while self._own:
                self._driver.call("cuMemFree_v2", ctypes.c_uint64(self._own.pop()))
