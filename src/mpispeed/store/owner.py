"""Owner of a folder of swap files: a lock that ends with the process, and its identity in JSON.

Everything is done relative to open descriptors of folders, so that a link planted in a path meanwhile leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

OWNER_FILE = "owner.json"

LOCK_SECONDS = 10.0
"""How long the maker of a folder waits for one who looks whether it is alive; that takes microseconds."""

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_OWNER_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Identity:
    """Content of the owner file.

    Attributes:
        host: name of the node.
        pid: process there.
        user: user id.
        started: seconds since 1970.
        boot: the kernel's name for the time since the node was started.
        is_locked: False where the file system has no locks, so that nobody can tell whether the owner is alive.
    """

    host: str
    pid: int
    user: int
    started: float
    boot: str
    is_locked: bool = True

    def is_here(self, *, is_network: bool) -> bool:
        """True if the lock of that process, were it alive, would be seen from this one.

        On a network file system a restarted node and another one of the same name look alike.
        """
        return self.is_locked and self.host == socket.gethostname() and (self.boot == boot_id() or not is_network)


def boot_id() -> str:
    """Changes whenever the node is started; empty where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class OwnerLock:
    """The open owner file; its lock is held until `close` or the end of the process, however it ends."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_held = False
        _OPEN.add(self)

    def take(self, wait_seconds: float = 0.0) -> bool:
        """Try to lock; False if somebody else holds it.

        Raises:
            OSError: the file system has no locks.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                # flock and not lockf: it belongs to the open file, so a second folder of the same process meets it too.
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.001)
            else:
                self.is_held = True
                return True

    def read(self) -> Identity | None:
        """Content of the file; None if it is not, or not completely, written."""
        try:
            found = json.loads(os.pread(self.fd, _OWNER_BYTES, 0))
            return Identity(
                str(found["host"]), int(found["pid"]), int(found["user"]), float(found["started"]),
                str(found["boot"]), bool(found["is_locked"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError):
            return None

    def is_still(self, folder_fd: int) -> bool:
        """True if the folder still has this very file."""
        try:
            named = os.stat(OWNER_FILE, dir_fd=folder_fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self.fd))

    def close(self) -> None:
        """Let go of the lock; does nothing the second time."""
        _OPEN.discard(self)
        fd, self.fd, self.is_held = self.fd, -1, False
        if fd >= 0:
            os.close(fd)


_OPEN: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child has the lock too and would keep it after the death of its parent.
    for lock in list(_OPEN):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def own(folder_fd: int) -> OwnerLock:
    """Make the owner file of a new folder and hold its lock.

    Raises:
        OSError: it cannot be made, or somebody else holds its lock.
    """
    lock = OwnerLock(os.open(OWNER_FILE, _FILE_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd))
    try:
        # Written only under the lock: whoever finds a complete file and a free lock knows that the owner is dead.
        _take_own(lock)
        identity = Identity(socket.gethostname(), os.getpid(), os.geteuid(), time.time(), boot_id(), lock.is_held)
        os.pwrite(lock.fd, json.dumps(asdict(identity)).encode(), 0)
    except BaseException:
        lock.close()
        raise
    return lock


def _take_own(lock: OwnerLock) -> None:
    try:
        is_taken = lock.take(LOCK_SECONDS)
    except OSError as failure:
        if failure.errno not in _NO_LOCKS:
            raise
        return  # the file will say that it is not locked
    if not is_taken:
        raise OSError(errno.EBUSY, "another process keeps the owner file locked", OWNER_FILE)


def look(folder_fd: int) -> OwnerLock | None:
    """The owner file of a folder, not yet locked; None if there is none, or it is no plain file of ours."""
    try:
        # O_NONBLOCK: opening a named pipe in its place would block.
        fd = os.open(OWNER_FILE, _FILE_FLAGS | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(fd)
        return None
    return OwnerLock(fd)


@contextmanager
def opened(name: str | os.PathLike[str], folder_fd: int | None = None) -> Iterator[int]:
    """The descriptor of a folder that is no link.

    Raises:
        OSError: it is not there, a link, or no folder.
    """
    fd = os.open(name, FOLDER_FLAGS, dir_fd=folder_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it, where they are missing: for this user alone.

    Existing folders may be reached through links. From the first missing folder on no link is followed, and a folder
    that another process makes meanwhile has to be this user's. Safe for concurrent processes.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    kind, is_new = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, False  # O_PATH: folders above may not be readable
    above = os.open(path.anchor or ".", kind)
    try:
        for part in path.relative_to(path.anchor).parts:
            try:
                below = os.open(part, kind | (os.O_NOFOLLOW if is_new else 0), dir_fd=above)
            except FileNotFoundError:
                is_new = True
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=above)
                below = _open_own(part, kind | os.O_NOFOLLOW, above)
            os.close(above)
            above = below
    finally:
        os.close(above)


def _open_own(name: str, flags: int, above: int) -> int:
    try:
        fd = os.open(name, flags, dir_fd=above)
    except NotADirectoryError:
        raise OSError(errno.ENOTDIR, f"{name} is a link that leads nowhere, or no folder", name) from None
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EPERM, f"{name} was made by another user meanwhile", name)
    return fd


def is_private(folder_fd: int) -> bool:
    """True if the folder is this user's and nobody else may write to it."""
    status = os.fstat(folder_fd)
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def discard(folder_fd: int, names: Sequence[str]) -> list[OSError]:
    """Unlink files of a folder, missing ones included; returns the errors."""
    failures = []
    for name in names:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder_fd)
        except OSError as failure:
            failures.append(failure)
    return failures
