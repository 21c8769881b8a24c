"""Asynchronous reads and writes between files and host tensors, in threads that do not hold the interpreter lock."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native import status
from mpispeed.native.block_file import ALIGNMENT, BlockFile, Probe, kernel_refusal, probe, settle
from mpispeed.native.page_memory import aligned
from mpispeed.native.status import check_tensors

__all__ = [
    "ALIGNMENT",
    "BlockFile",
    "BlockIO",
    "Counters",
    "Moved",
    "Options",
    "Probe",
    "Transfer",
    "aligned",
    "inject",
    "inject_latency",
    "probe",
]

# threads of the pool of system calls: more of them only wait for the same disk
MAX_WORKERS = 16
_KINDS = {"threads": 0, "queue": 1, "uring": 2}
_PAST_END = -1
_LEAST_PART = 1 << 16  # bytes; shorter transfers are not shared by threads


@dataclass(frozen=True, slots=True)
class Options:
    """Options of splitting and queueing transfers.

    `block_size` (bytes) is the longest request; on a file opened with O_DIRECT it is rounded up to whole
    pages of 4096 bytes. A thread keeps `queue_depth` requests in flight. `threads` threads share a
    transfer in equal parts. `single_submit`: one system call for each request; `overlap_events`: refill
    the queue as requests complete, rather than batch by batch. Backends: "queue" (the kernel's, as in
    libaio), "uring", "threads" (`threads` x `queue_depth`, at most 16, that call pread and pwrite), "auto"
    ("queue" for files opened with O_DIRECT where the kernel has it, otherwise "threads").

    Raises:
        ConfigError: a number below 1, or an unknown backend.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        """Check."""
        for name in ("block_size", "queue_depth", "threads"):
            if getattr(self, name) < 1:
                msg = f"block I/O: {name} is {getattr(self, name)}; it has to be at least 1"
                raise ConfigError(msg)
        if self.backend not in {"auto", *_KINDS}:
            msg = f"block I/O: backend is {self.backend!r}; use auto, queue, uring or threads"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Counters:
    """Requests that were performed, failed ones too, and the bytes that they moved."""

    bytes_read: int
    requests_read: int
    bytes_written: int
    requests_written: int


class Moved(NamedTuple):
    """A transfer that is over; times in seconds of CLOCK_MONOTONIC, which `time.perf_counter` reads."""

    is_write: bool
    nbytes: int
    begin: float
    end: float


class Transfer:
    """A range of a file on its way to or from a buffer, which must be left alone until it is done."""

    def __init__(self, job: Any, pool: Any, file: BlockFile, buffer: torch.Tensor, offset: int, is_write: bool) -> None:
        self._job, self._pool, self._file, self._buffer = job, pool, file, buffer
        self.path = file.path
        self.nbytes = buffer.numel() * buffer.element_size()
        self.offset = offset
        self.is_write = is_write

    def is_done(self) -> bool:
        """True once it has ended, well or not; never blocks, never raises."""
        done: bool = self._job.is_done()
        return done

    def wait(self) -> None:
        """Wait until it has ended, without the interpreter lock; repeated calls have the same result.

        Raises:
            OSError: what the system reported, with the path; EIO where the file ends before the range.
            UsageError: in a forked process, for a transfer that was under way when it was forked.
        """
        if not settle(self._job, self._pool):
            msg = f"{self.path}: this transfer belongs to the process that started it, this is a fork of it"
            raise UsageError(msg)
        code, at = self._job.error()
        if code:
            raise self._failure(code, at)

    def _failure(self, code: int, at: int) -> OSError:
        verb = "writing" if self.is_write else "reading"
        what = f"{verb} {self.nbytes} bytes at offset {self.offset}"
        if code != _PAST_END:
            return OSError(code, f"{os.strerror(code)}, {what} failed at offset {at}", self.path)
        try:
            length = f"the file is {self._file.size()} bytes long"
        except OSError:
            length = f"the file ended at offset {at}"
        return OSError(errno.EIO, f"{what} reaches past the end: {length}", self.path)


class _Pools:
    """The threads of a BlockIO, each kind started when it is first needed, and the transfers under way."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pools: dict[str, Any] = {}
        self.pending: dict[int, Transfer] = {}
        self.lock = threading.Lock()
        self.is_closed = False

    def get(self, backend: str) -> Any:
        with self.lock:
            if backend not in self.pools:
                o = self.options
                threads = min(MAX_WORKERS, o.threads * o.queue_depth) if backend == "threads" else o.threads
                self.pools[backend] = status.require("block_io").Pool(
                    _KINDS[backend], threads, o.queue_depth, o.block_size, o.single_submit, o.overlap_events
                )
            return self.pools[backend]

    def keep(self, transfer: Transfer) -> None:
        """Hold a transfer, its buffer and its file; let go of older ones that are done."""
        with self.lock:
            while self.pending:
                first = next(iter(self.pending))
                if not self.pending[first].is_done():
                    break
                del self.pending[first]
            self.pending[id(transfer)] = transfer

    def close(self) -> None:
        self.is_closed = True
        for pool in self.pools.values():
            pool.close()
        if all(transfer.is_done() for transfer in self.pending.values()):  # not so in a fork
            self.pending.clear()


class BlockIO:
    """Reads and writes that go on while the caller computes.

    `backend` is the one in use for files opened with O_DIRECT, `reason` the reason for no better one with "auto".
    It belongs to one process: a fork cannot use it, and leaves it alone when it ends.

    Raises:
        ConfigError: the named backend is not possible here; the message says why.
        OSError: its threads or queues cannot be made.
        NativeMissing: the compiled module is not usable.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        status.require("block_io")
        self.backend, self.reason = _choose(self.options.backend)
        self._pools = _Pools(self.options)
        try:
            self._pools.get(self.backend)
        except OSError as error:
            if self.options.backend != "auto" or self.backend == "threads":
                raise
            self.backend, self.reason = "threads", f"no queue of the kernel: {error.strerror}"
            self._pools.get(self.backend)
        self._noted: list[tuple[bool, int, Any]] | None = None
        self._end = weakref.finalize(self, self._pools.close)

    def read(self, file: BlockFile, buffer: torch.Tensor, offset: int = 0) -> Transfer:
        """Start to fill `buffer`, a contiguous host tensor, from the bytes of the file at `offset`.

        The buffer is kept alive until the transfer is done, and holds nothing before that.

        Raises:
            ValueError: the buffer is not contiguous or not on the host, or there is no such range of bytes.
            OSError: the file was closed, or no thread can be started.
            UsageError: this was closed, or belongs to another process.
        """
        return self._start(file, buffer, offset, is_write=False)

    def write(self, file: BlockFile, buffer: torch.Tensor, offset: int = 0) -> Transfer:
        """Start to write the bytes of `buffer`, a contiguous host tensor, to the file at `offset`.

        The buffer is kept alive until the transfer is done, and must not change before that.

        Raises:
            ValueError: the buffer is not contiguous or not on the host, or there is no such range of bytes.
            OSError: the file was closed, or no thread can be started.
            UsageError: this was closed, or belongs to another process.
        """
        return self._start(file, buffer, offset, is_write=True)

    def _start(self, file: BlockFile, buffer: torch.Tensor, offset: int, *, is_write: bool) -> Transfer:
        nbytes = check_tensors("BlockIO", {"buffer": buffer}) * buffer.element_size()
        if not 0 <= offset < (1 << 63) - nbytes:
            msg = f"BlockIO: {nbytes} bytes at offset {offset} are no range of a file; offsets are 0 to 2**63 - 1"
            raise ValueError(msg)
        if self._pools.is_closed:
            msg = f"{file.path}: the BlockIO was closed; make a new one"
            raise UsageError(msg)
        middle = (offset + nbytes) // ALIGNMENT * ALIGNMENT - -(-offset // ALIGNMENT) * ALIGNMENT
        direct, plain = file.descriptors(has_odd_bytes=middle < nbytes)
        if direct >= 0 and middle <= 0:
            direct = -1
        pool = self._pools.get("threads" if direct < 0 and self.options.backend == "auto" else self.backend)
        if pool.is_foreign():
            msg = f"{file.path}: this BlockIO belongs to the process that made it, this is a fork: make one here"
            raise UsageError(msg)
        parts = max(1, min(self.options.threads, nbytes // _LEAST_PART))
        job = pool.submit(direct, plain, is_write, buffer.data_ptr(), nbytes, offset, parts)
        if job is None:
            msg = f"{file.path}: the BlockIO was closed; make a new one"
            raise UsageError(msg)
        transfer = Transfer(job, pool, file, buffer, offset, is_write)
        noted = self._noted  # another thread may end the noting now
        if noted is not None:
            noted.append((is_write, nbytes, job))
        file.watch(job, pool)
        self._pools.keep(transfer)
        return transfer

    def note(self) -> Callable[[], list[Moved]]:
        """Note transfers from now on; the returned function ends that, and gives those that are over."""
        noted = self._noted = []

        def end() -> list[Moved]:
            self._noted = None
            return [Moved(is_write, nbytes, *job.times()) for is_write, nbytes, job in noted if job.is_done()]

        return end

    @property
    def counters(self) -> Counters:
        """Requests and bytes moved since this was made; a finished transfer is counted in full."""
        found = [pool.counters() for pool in self._pools.pools.values()]
        return Counters(*(sum(column) for column in zip(*found, strict=True))) if found else Counters(0, 0, 0, 0)

    def close(self) -> None:
        """Wait for transfers under way and end the threads; idempotent."""
        self._end()

    def __enter__(self) -> BlockIO:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _choose(backend: str) -> tuple[str, str]:
    """(backend, why it is not a better one)."""
    if backend == "threads":
        return backend, "it was named"
    name = "queue" if backend == "auto" else backend
    refusal = kernel_refusal(name)
    if not refusal:
        return name, ""
    if backend == "auto":
        return "threads", refusal
    msg = f'block I/O: backend "{backend}" is not possible here: {refusal}; use "auto" or "threads"'
    raise ConfigError(msg)


def inject(op: str, *, nth: int = 1, errno: int = 0, after_bytes: int = 0) -> None:
    """For tests: make the `nth` request from now, of "read" or "write" in this process, fail once.

    It stops short after `after_bytes` if given, and then fails with `errno` if given. `nth` 0 cancels. Also "submit"
    and "reap": the call that hands requests to a queue of the kernel, and the one that fetches answers, fail with
    `errno`.

    Raises:
        ValueError: no such `op`.
    """
    status.require("block_io").inject(op, nth, errno, after_bytes)


def inject_latency(seconds: float) -> None:
    """For tests: every request in this process takes so much longer; 0 ends it."""
    status.require("block_io").inject_latency(seconds)
