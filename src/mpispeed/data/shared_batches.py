"""Batches on their way from a worker process: arrays in memory that both processes map, the rest pickled.

The memory is of unnamed files (memfd), made before the worker is forked: nothing is left behind by a process that is
killed, and the size of /dev/shm, which containers keep small, does not matter.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 64
Place = Callable[[torch.Tensor], torch.Tensor]


class Slot:
    """Memory for one batch at a time; it grows with the largest one. Both processes have the object."""

    def __init__(self) -> None:
        self._file = os.memfd_create("mpispeed-batch")
        self._map: mmap.mmap | None = None

    def at_least(self, nbytes: int) -> mmap.mmap:
        """The memory, of so many bytes or more."""
        if self._map is None or len(self._map) < nbytes:
            if os.fstat(self._file).st_size < nbytes:
                os.ftruncate(self._file, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return self._map

    def close(self) -> None:
        """Let go of the memory in this process."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Packer(pickle.Pickler):
    """Takes plain tensors out of what it pickles."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.tensors: list[tuple[torch.Tensor, int]] = []  # with their offsets
        self.end = 0

    def persistent_id(self, obj: Any) -> Any:
        """Place of a tensor that travels in shared memory; None for all else."""
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return None
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.tensors.append((obj, start))
        self.end = start + obj.numel() * obj.element_size()
        return obj.dtype, tuple(obj.shape), start


def _is_plain(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.layout == torch.strided and not x.requires_grad and not x.is_quantized


class _Unpacker(pickle.Unpickler):
    def __init__(self, text: bytes, buffers: list[bytearray], memory: mmap.mmap | None, place: Place) -> None:
        super().__init__(io.BytesIO(text), buffers=buffers)
        self._memory, self._place = memory, place

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape, start = pid
        if 0 in shape or self._memory is None:
            return torch.empty(shape, dtype=dtype)
        return self._place(_view(self._memory, dtype, shape, start))


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def pack(batch: Any, slot: Slot) -> bytes:
    """Put `batch` into `slot`; returns what `unpack` needs beside it.

    Raises:
        Exception: the batch, or a part of it, cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    text = io.BytesIO()
    packer = _Packer(text, buffers)
    packer.dump(batch)
    spans, end = [], packer.end
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        spans.append((start, buffer.raw().nbytes))
        end = start + spans[-1][1]
    if end:
        memory = slot.at_least(end)
        for tensor, start in packer.tensors:
            if tensor.numel():
                _view(memory, tensor.dtype, tuple(tensor.shape), start).copy_(tensor)
        for buffer, (start, nbytes) in zip(buffers, spans, strict=True):
            memory[start : start + nbytes] = buffer.raw()
    return pickle.dumps((end, spans, text.getvalue()))


def unpack(message: bytes, slot: Slot, place: Place = torch.Tensor.clone) -> Any:
    """The batch that was packed, in memory of its own: the slot may be used again.

    Args:
        message: what `pack` returned in the other process.
        slot: the same.
        place: copies a tensor out of shared memory.
    """
    end, spans, text = pickle.loads(message)
    memory = slot.at_least(end) if end else None
    buffers = [bytearray() if memory is None else bytearray(memory[at : at + nbytes]) for at, nbytes in spans]
    return _Unpacker(text, buffers, memory, place).load()
