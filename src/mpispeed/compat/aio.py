"""DeepSpeed's asynchronous I/O handle: tensors to and from files, with its calls and return codes.

Differences from DeepSpeed's are in docs/guides/block-io.md.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.base.log import once
from mpispeed.native.block_io import BlockFile, BlockIO, Options, Transfer
from mpispeed.native.page_memory import aligned, lock_memory, unlock_memory

_logger = logging.getLogger("mpispeed.aio")
_COMPARE_BYTES = 1 << 24


@dataclass(slots=True)
class _Pending:
    """A transfer and the work after it; `target` gets the content of a bounce buffer that was read."""

    transfer: Transfer
    buffer: Tensor
    target: Tensor | None
    offset: int
    is_checked: bool


class aio_handle:
    """Reads and writes of tensors, blocking or queued.

    Units: `block_size` in bytes. A thread keeps `queue_depth` requests of `block_size` in flight;
    `intra_op_parallelism` threads share a transfer in equal parts, so the bytes of a buffer have to be a
    multiple of it. `backend` is one of `native.block_io.Options`. `truncate`: a write without an offset
    leaves a file of exactly the buffer's bytes.

    A buffer that is page-locked, by `new_cpu_locked_tensor` or by torch, is used as it is: leave it alone
    until `wait`. Any other one, on a device too, is copied: a write when it is queued, a read in `wait`.

    Raises:
        ConfigError: a number below 1, or a backend that is not possible here.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        backend: str = "auto",
        truncate: bool = True,
    ) -> None:
        self._options = Options(block_size, queue_depth, intra_op_parallelism, single_submit, overlap_events, backend)
        self._truncate = truncate
        self._io = BlockIO(self._options)
        self._files: dict[tuple[str, bool], BlockFile] = {}
        self._pending: list[_Pending] = []
        self._locked: dict[int, Tensor] = {}

    def get_block_size(self) -> int:
        """Bytes of a request."""
        return self._options.block_size

    def get_queue_depth(self) -> int:
        """Requests that a thread keeps in flight."""
        return self._options.queue_depth

    def get_single_submit(self) -> bool:
        """True if each request is submitted by its own system call."""
        return self._options.single_submit

    def get_overlap_events(self) -> bool:
        """True if the queue is refilled as requests complete."""
        return self._options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads that share a transfer."""
        return self._options.threads

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill the buffer from the file now, beside pending transfers. Return 0, or -1 if it cannot be opened.

        Raises:
            UsageError: at offset 0, the file is not as long as the buffer.
            OSError: what the system reported.
        """
        return self._at_once(buffer, filename, validate, file_offset, is_write=False)

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int | None = None) -> int:
        """Write the buffer to the file now, beside pending transfers. Return 0, or -1 if it cannot be opened.

        Raises:
            OSError: what the system reported.
        """
        return self._at_once(buffer, filename, validate, file_offset, is_write=True)

    def pread(self, buffer: Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Queue a read of the buffer's bytes; if not `is_async`, `wait`. A shorter file fills the front only.

        Gives 0, or what `wait` gives; -1, with the reason in the log, if the file cannot be opened or the
        bytes are no multiple of the threads.

        Raises:
            OSError: from `wait`.
        """
        return self._queue(buffer, filename, validate, is_async, file_offset, is_write=False)

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool, is_async: bool, file_offset: int | None = None
    ) -> int:
        """Queue a write of the buffer; if not `is_async`, `wait`. A missing file is created with mode 0600.

        Gives 0, or what `wait` gives; -1, with the reason in the log, if the file cannot be opened or the
        bytes are no multiple of the threads.

        Raises:
            OSError: from `wait`.
        """
        return self._queue(buffer, filename, validate, is_async, file_offset, is_write=True)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """`pread` that waits, without a check."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int | None = None) -> int:
        """`pwrite` that waits, without a check."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """`pread` that does not wait, without a check."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str, file_offset: int | None = None) -> int:
        """`pwrite` that does not wait, without a check."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Complete all pending transfers, close their files, and return their number.

        Raises:
            OSError: the first failure in order of submission, after all have ended; the others are logged.
        """
        pending, self._pending = self._pending, []
        failures: list[OSError] = []
        for entry in pending:
            try:
                _finish(entry)
            except OSError as error:
                failures.append(error)
        if not self._pending:
            self._close_files()
        for later in failures[1:]:
            _logger.warning("aio: %s", later)
        if failures:
            raise failures[0]
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of `num_elem` elements of the example's dtype, page-aligned and page-locked.

        Where the limit on locked memory is too small, the log says so once and the tensor is not locked.

        Raises:
            ValueError: a negative number.
            MemoryError: there is no memory.
        """
        nbytes = num_elem * example_tensor.element_size()
        memory = aligned(nbytes, pin=True)
        reason = lock_memory(memory)
        if reason:
            once(_logger, logging.WARNING, f"aio: {nbytes} bytes are not page-locked: {reason}")
        locked = memory.view(example_tensor.dtype)
        self._locked[locked.data_ptr()] = locked
        return locked

    def free_cpu_locked_tensor(self, locked: Tensor) -> bool:
        """Unlock a tensor of `new_cpu_locked_tensor` and forget it; False if it is not one of this handle."""
        known = self._locked.get(locked.data_ptr())
        if known is None or known.numel() == 0 or locked.numel() * locked.element_size() != known.nbytes:
            return False
        unlock_memory(self._locked.pop(locked.data_ptr()))
        return True

    def close(self) -> None:
        """Wait for pending transfers and end the threads; failures are logged. A second call has no effect."""
        try:
            self.wait()
        except OSError as error:
            _logger.warning("aio: %s", error)
        self._io.close()

    def _at_once(self, buffer: Tensor, filename: str, validate: bool, offset: int | None, *, is_write: bool) -> int:
        began = time.perf_counter()
        if not is_write and not offset and Path(filename).exists():
            length = Path(filename).stat().st_size
            if length != buffer.nbytes:
                msg = f"{filename}: the file has {length} bytes and the buffer {buffer.nbytes}; they have to be equal"
                raise UsageError(msg)
        entry = self._begin(buffer, filename, validate, offset, is_write=is_write)
        if entry is None:
            return -1
        try:
            _finish(entry)
        finally:
            if not self._pending:
                self._close_files()
        seconds = time.perf_counter() - began
        verb = "wrote" if is_write else "read"
        _logger.info("aio: %s %d bytes of %s in %.3f ms", verb, buffer.nbytes, filename, 1e3 * seconds)
        return 0

    def _queue(
        self, buffer: Tensor, filename: str, validate: bool, is_async: bool, offset: int | None, *, is_write: bool
    ) -> int:
        if buffer.nbytes % self._options.threads:
            _logger.error(
                "aio: %s: %d bytes are no multiple of intra_op_parallelism %d",
                filename,
                buffer.nbytes,
                self._options.threads,
            )
            return -1
        entry = self._begin(buffer, filename, validate, offset, is_write=is_write)
        if entry is None:
            return -1
        self._pending.append(entry)
        return 0 if is_async else self.wait()

    def _begin(
        self, buffer: Tensor, filename: str, validate: bool, offset: int | None, *, is_write: bool
    ) -> _Pending | None:
        try:
            file = self._open(filename, is_write=is_write)
            if is_write and offset is None and self._truncate and file.size() > buffer.nbytes:
                file.truncate(buffer.nbytes)
        except OSError as error:
            _logger.error("aio: %s", error)  # noqa: TRY400 - the return code says that it failed
            return None
        start = offset or 0
        moved = buffer.detach() if self._is_used_as_it_is(buffer) else self._bounce(buffer, is_write=is_write)
        if not is_write and start < file.size() < start + moved.nbytes:
            moved = moved.reshape(-1).view(torch.uint8)[: file.size() - start]
        transfer = (self._io.write if is_write else self._io.read)(file, moved, start)
        has_copy = not is_write and not self._is_used_as_it_is(buffer)
        return _Pending(transfer, moved, buffer if has_copy else None, start, validate)

    def _open(self, filename: str, *, is_write: bool) -> BlockFile:
        key = (os.path.realpath(filename), is_write)
        if key not in self._files:
            self._files[key] = _open_for_write(key[0]) if is_write else BlockFile(key[0], readonly=True)
        return self._files[key]

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _is_used_as_it_is(self, buffer: Tensor) -> bool:
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            return False
        begin = buffer.data_ptr()
        end = begin + buffer.nbytes
        if any(start <= begin and end <= start + known.nbytes for start, known in self._locked.items()):
            return True
        return torch.cuda.is_available() and buffer.is_pinned()

    def _bounce(self, buffer: Tensor, *, is_write: bool) -> Tensor:
        copy = aligned(buffer.nbytes).view(buffer.dtype).view(buffer.shape)
        if is_write:
            copy.copy_(buffer.detach())
        return copy


def _open_for_write(path: str) -> BlockFile:
    for _ in range(16):
        try:
            return BlockFile(path)
        except FileNotFoundError:
            try:
                return BlockFile(path, create=True)
            except FileExistsError:
                continue  # another process made it between the two
    raise FileExistsError(errno.EEXIST, "it comes and goes while it is opened", path)


def _finish(entry: _Pending) -> None:
    """Wait for a transfer, check it, and copy a bounce buffer that was read to its target."""
    entry.transfer.wait()
    if entry.is_checked:
        _check(entry)
    if entry.target is not None:
        got = entry.buffer.reshape(-1).view(torch.uint8)
        if got.numel() == entry.target.nbytes:
            entry.target.detach().copy_(got.view(entry.target.dtype).view(entry.target.shape))
        else:  # the file was shorter: the rest stays as it is
            whole = entry.target.detach().cpu().contiguous().clone()
            whole.reshape(-1).view(torch.uint8)[: got.numel()] = got
            entry.target.detach().copy_(whole)


def _check(entry: _Pending) -> None:
    """Read the range again with ordinary reads, and compare.

    Raises:
        OSError: EIO, with the first byte that differs.
    """
    expected = entry.buffer.reshape(-1).view(torch.uint8).numpy()
    with Path(entry.transfer.path).open("rb") as file:
        file.seek(entry.offset)
        for start in range(0, len(expected), _COMPARE_BYTES):
            part = expected[start : start + _COMPARE_BYTES].tobytes()
            found = file.read(len(part))
            if found != part:
                at = next((i for i, (a, b) in enumerate(zip(found, part, strict=False)) if a != b), len(found))
                msg = f"validation: the file differs from the buffer at offset {entry.offset + start + at}"
                raise OSError(errno.EIO, msg, entry.transfer.path)


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """Read a whole file through a new handle, as `aio_handle.read`."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.read(buffer, filename, validate)
    finally:
        handle.close()


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """Write a whole file through a new handle, as `aio_handle.write`."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.write(buffer, filename, validate)
    finally:
        handle.close()


def memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy the bytes of `src` to `dest`, contiguous host tensors of the same size; return 0.

    Raises:
        UsageError: they differ in size, or one is not contiguous or not on the host.
    """
    for name, x in (("dest", dest), ("src", src)):
        if x.device.type != "cpu" or not x.is_contiguous():
            msg = f"memcpy: {name} has to be contiguous and on the host; it is on {x.device} with strides {x.stride()}"
            raise UsageError(msg)
    if dest.nbytes != src.nbytes:
        msg = f"memcpy: dest has {dest.nbytes} bytes and src {src.nbytes}"
        raise UsageError(msg)
    dest.detach().reshape(-1).view(torch.uint8).copy_(src.detach().reshape(-1).view(torch.uint8))
    return 0
