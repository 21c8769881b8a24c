"""Memory of the stand-in device mapped by several processes: files in memory, and signals on the host."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from mpispeed.native.mapped_memory import Mapper, Signal, tensor_at

_MARK = 1 << 52  # of addresses of the device, as in csrc/standin.h


class HostSignal(Signal):
    """Set when the device has done what was queued; so there is nothing left to follow, and the host has waited."""

    handle = b"on the host"

    def __init__(self, device):
        self._device = device

    def set(self):
        torch.get_device_module(self._device).current_stream(self._device).synchronize()

    def follow(self):
        pass


class SharedMapper(Mapper):
    """Files without a name, which end with their process; what nobody wrote is not a number, as all of the device."""

    waits_on_host = True

    def __init__(self, device):
        super().__init__(device)
        self._maps, self._files = [], []

    def allocate(self, nbytes):
        number = os.memfd_create("mpispeed-standin")
        self._files.append(number)
        os.ftruncate(number, nbytes)
        found = self._map(number, nbytes)
        found.fill_(0xFF)
        return found, f"/proc/{os.getpid()}/fd/{number}".encode()

    def open(self, handle, nbytes):
        number = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        try:
            return self._map(number, nbytes)
        finally:
            os.close(number)

    def _map(self, number, nbytes):
        memory = mmap.mmap(number, nbytes)
        self._maps.append(memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return tensor_at(address | _MARK, nbytes, self.device)

    def make_signal(self):
        return HostSignal(self.device)

    def open_signal(self, handle):
        assert handle.rstrip(b"\0") == HostSignal.handle
        return HostSignal(self.device)

    def let_go(self):
        """What was mapped stays so as long as this object: a tensor may still be over it."""

    def free(self):
        while self._files:
            os.close(self._files.pop())
