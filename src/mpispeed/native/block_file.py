"""Files for block I/O in ranges, opened with O_DIRECT where a probe of folder and kernel says that it works."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import stat
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mpispeed.native import status

ALIGNMENT = 4096
_KINDS = {"queue": 1, "uring": 2}


@dataclass(frozen=True, slots=True)
class Probe:
    """Capabilities of a folder and this process.

    Units: `alignment` and `mlock_limit` in bytes; no limit is None. `backend` is that of "auto" for files in the
    folder. The reasons are those against better ones, "" where it is the best.
    """

    folder: str
    is_direct: bool
    direct_reason: str
    backend: str
    backend_reason: str
    alignment: int
    mlock_limit: int | None


@cache
def kernel_refusal(backend: str) -> str:
    """Reason why the kernel does not let this process use "queue" or "uring"; "" if it does."""
    module = status.require("block_io")
    code = module.probe_kernel(_KINDS[backend])
    if code == 0:
        return ""
    call = "io_setup" if backend == "queue" else "io_uring_setup"
    why = {
        errno.EPERM: "a seccomp filter, as of a container, or the sysctl kernel.io_uring_disabled forbids it",
        errno.ENOSYS: "the kernel is older, or was built without it",
        errno.EAGAIN: "the limit fs.aio-max-nr is used up",
        errno.ENOMEM: "the limit on locked memory (RLIMIT_MEMLOCK) is too small",
    }.get(code, os.strerror(code))
    return f"{call} failed with {errno.errorcode.get(code, code)}: {why}"


def probe(folder: str | os.PathLike[str]) -> Probe:
    """Capabilities of asynchronous I/O for files in `folder`; cached per folder.

    Writes a block to a temporary file without a name and reads it back.

    Raises:
        OSError: the folder cannot be examined.
    """
    return _probe(os.path.realpath(folder))


@lru_cache(maxsize=256)
def _probe(folder: str) -> Probe:
    os.stat(folder)  # noqa: PTH116 - OSError with the path for a folder that is not there
    direct_reason = _direct_refusal(folder)
    backend_reason = kernel_refusal("queue")
    if not backend_reason and direct_reason:
        backend_reason = "io_submit blocks on files that are not opened with O_DIRECT"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Probe(
        folder=folder,
        is_direct=not direct_reason,
        direct_reason=direct_reason,
        backend="threads" if backend_reason else "queue",
        backend_reason=backend_reason,
        alignment=ALIGNMENT,
        mlock_limit=None if limit == resource.RLIM_INFINITY else limit,
    )


def _direct_refusal(folder: str) -> str:
    """Reason why O_DIRECT does not work in the folder; "" if it does."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no O_DIRECT"
    try:
        handle, path = tempfile.mkstemp(prefix=".mpispeed-probe-", dir=folder)
    except OSError as error:
        return f"no file can be written there to try it: {error.strerror}"
    try:
        os.close(handle)
        return direct_file_refusal(path, os.O_RDWR, is_written=True)
    finally:
        Path(path).unlink(missing_ok=True)


def direct_file_refusal(path: str, flags: int, *, is_written: bool = False) -> str:
    """Reason why a file cannot be used with O_DIRECT, tried with one block; "" if it can."""
    try:
        handle = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return f"open with O_DIRECT: {error.strerror}"
    try:
        with mmap.mmap(-1, ALIGNMENT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            if is_written:
                os.pwritev(handle, [block], 0)
            os.preadv(handle, [block], 0)
    except OSError as error:
        return f"a block of {ALIGNMENT} bytes by O_DIRECT: {error.strerror}"
    finally:
        os.close(handle)
    return ""


_LOOK_SECONDS = 0.2  # between two looks at the interpreter's signals
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class BlockFile:
    """An open file that is read and written in ranges.

    A new one has mode 0600; a symbolic link as the last part of the path is refused. `direct` None: with
    O_DIRECT if that works in the folder; True: an error if it does not.

    Raises:
        OSError: it cannot be opened; with `create`, also when it is already there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        direct: bool | None = None,
        readonly: bool = False,
    ) -> None:
        self._fd = -1
        self.path = os.fspath(path)
        access = os.O_RDONLY if readonly else os.O_RDWR
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        self._access = access
        self._fd = os.open(self.path, flags | os.O_NONBLOCK, 0o600)  # of a pipe, too, this returns
        self._plain: int | None = self._fd
        self._jobs: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()
        self.is_direct = False
        try:
            self._check_kind()
            self._go_direct(direct)
        except BaseException:
            self.close()
            raise

    def _check_kind(self) -> None:
        os.set_blocking(self._fd, True)
        mode = os.fstat(self._fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "block I/O needs a regular file or a block device", self.path)

    def _go_direct(self, direct: bool | None) -> None:
        if direct is False:
            return
        refusal = ""
        if direct is None:
            folder = os.path.dirname(self.path) or "."  # noqa: PTH120
            if not os.access(folder, os.W_OK):
                refusal = direct_file_refusal(f"/proc/self/fd/{self._fd}", os.O_RDONLY)
            else:
                refusal = probe(folder).direct_reason
            if refusal:
                return
        try:
            # The file that is open already, whatever has become of its name.
            other = os.open(f"/proc/self/fd/{self._fd}", self._access | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if direct is None:
                return
            raise OSError(error.errno, f"O_DIRECT is refused: {error.strerror}", self.path) from None
        os.close(self._fd)
        self._fd, self._plain, self.is_direct = other, None, True

    def size(self) -> int:
        """Bytes of the file.

        Raises:
            OSError: the file was closed.
        """
        return os.fstat(self._open()).st_size

    def allocate(self, nbytes: int) -> bool:
        """Make the file at least `nbytes` long; whether the space is reserved on the disk.

        A file system that cannot reserve space makes a file with a hole.

        Raises:
            OSError: ENOSPC and others, with the path.
        """
        handle = self._open()
        if nbytes == 0:
            return True
        try:
            if reserve(handle, nbytes):
                return True
        except OSError as error:
            raise OSError(error.errno, f"{nbytes} bytes cannot be reserved: {error.strerror}", self.path) from None
        if self.size() < nbytes:
            try:
                os.ftruncate(handle, nbytes)
            except OSError as error:
                raise OSError(error.errno, f"cannot grow to {nbytes} bytes: {error.strerror}", self.path) from None
        return False

    def truncate(self, nbytes: int) -> None:
        """Make the file exactly `nbytes` long.

        Raises:
            OSError: it cannot be, with the path.
        """
        try:
            os.ftruncate(self._open(), nbytes)
        except OSError as error:
            raise OSError(error.errno, f"cannot be cut to {nbytes} bytes: {error.strerror}", self.path) from None

    def close(self) -> None:
        """Wait for the transfers that are under way on it, and close it; again does nothing."""
        for job, pool in self._jobs:
            settle(job, pool)
        self._jobs.clear()
        for handle in {self._fd, self._plain}:
            if handle is not None and handle >= 0:
                os.close(handle)
        self._fd, self._plain = -1, None

    def descriptors(self, *, has_odd_bytes: bool) -> tuple[int, int]:
        """Descriptors with and without O_DIRECT, -1 for none; the second one is opened when it is needed."""
        handle = self._open()
        if not self.is_direct:
            return -1, handle
        with self._lock:
            if has_odd_bytes and self._plain is None:
                self._plain = os.open(f"/proc/self/fd/{handle}", self._access | os.O_CLOEXEC)
        return handle, -1 if self._plain is None else self._plain

    def watch(self, job: Any, pool: Any) -> None:
        """Let `close` wait for a job of the compiled module."""
        with self._lock:
            while self._jobs and self._jobs[0][0].is_done():
                self._jobs.popleft()
            self._jobs.append((job, pool))

    def _open(self) -> int:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the file was closed", self.path)
        return self._fd

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                self.close()


def reserve(handle: int, nbytes: int) -> bool:
    """Reserve the first `nbytes` of an open file on the disk; False, and nothing done, where that is not possible.

    Not `os.posix_fallocate`: where a file system cannot reserve, that writes a byte into every block.

    Raises:
        OSError: ENOSPC and others.
    """
    call = _libc().fallocate
    while call(handle, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return library


def settle(job: Any, pool: Any) -> bool:
    """Wait until a job is over; False at once in a fork, where nothing will end it."""
    while not job.is_done():
        if pool.is_foreign():
            return False
        job.wait(_LOOK_SECONDS)
    return True
