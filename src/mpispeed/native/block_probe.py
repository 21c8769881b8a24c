"""Probe for asynchronous I/O: O_DIRECT in a folder, and the kernel's interfaces that this process may use."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

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
