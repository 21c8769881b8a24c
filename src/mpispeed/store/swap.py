"""Private folders of swap files: one per rank and run, deleted at the end, cleaned up after a killed run.

    root/mpispeed-swap-USERID/RUN.rankN/owner.json, NAME.swap ...

Swap files are scratch of a running process. Nothing in them survives it, and nobody but their user can read them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mpispeed.base.errors import StoreError
from mpispeed.base.units import format_bytes
from mpispeed.native.block_io import BlockFile
from mpispeed.store import owner
from mpispeed.store.mounts import free_bytes, mount_of
from mpispeed.store.owner import OWNER_FILE, OwnerLock

log = logging.getLogger(__name__)

UNFINISHED_SECONDS = 3600.0
"""Age from which a folder without a complete owner file is left over and not just being made."""

FOREIGN_SECONDS = 24 * 3600.0
"""Age from which folders of other hosts, whose locks may not be seen here, are pointed out."""

_SUFFIX = ".swap"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_RANK_FOLDER = re.compile(_RUN.pattern + r"\.rank[0-9]{1,9}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
# Also the files that block I/O makes for a moment to try O_DIRECT.
_SWAP_FILE = re.compile(rf"{_FILE.pattern}{re.escape(_SUFFIX)}|\.mpispeed-probe-[a-z0-9_]+")
_ATTEMPTS = 100
_MAKE = "make it on every node, or name a folder that is there (nvme_path)"
_CHOOSE = "name a folder of a local disk that you may write to (nvme_path)"


def run_name() -> str:
    """A unique name of a run: host, process and a random part. One rank makes it and shares it."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:60] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(6)}"


def parent_name() -> str:
    """Name of the folder below the root that holds this user's rank folders.

    One per user, so that on a shared root nobody can block others by being first.
    """
    return f"mpispeed-swap-{os.geteuid()}"


class SwapFolder:
    """A private folder of one rank of one run below a root that the user named.

    It is deleted by `remove`, when the object is collected, or at the end of the process; a forked child deletes
    nothing. After SIGKILL or a crash `clean_stale` of a later run on that host does it.

    Args:
        root: an existing folder.
        run: the result of `run_name`, the same on all ranks.
        rank: number of this rank.

    Raises:
        StoreError: the root cannot be used; says why and what to do.
    """

    def __init__(self, root: Path, run: str, rank: int) -> None:
        if not _RUN.fullmatch(run) or rank < 0:
            msg = f"swap folder of run {run!r}, rank {rank}: runs are named by letters, digits and ._-, ranks from 0"
            raise StoreError(msg)
        self.root = root
        name = f"{run}.rank{rank}"
        self.path = root / parent_name() / name
        held = _make(root, name)
        self._held = held
        self._files: list[BlockFile] = []
        self._undo = weakref.finalize(self, held.remove)
        if not held.lock.is_held and rank == 0:
            log.warning("%s has no file locks: swap files of a run that is killed have to be deleted by hand", root)

    def file(self, name: str, nbytes: int, *, reserve: bool = True) -> BlockFile:
        """Make the file `name`.swap, which nobody else can read.

        Args:
            name: letters, digits and "._-".
            nbytes: its length.
            reserve: take the space from the disk now, so that a write cannot find it full.

        Raises:
            StoreError: the name is odd or taken, the folder is gone, or the disk refuses; gives path, bytes wanted
                and bytes free.
        """
        if not _FILE.fullmatch(name) or nbytes < 0:
            msg = f"swap file {name!r} of {nbytes} bytes in {self.path}: names have letters, digits and ._- only"
            raise StoreError(msg)
        path = self.path / f"{name}{_SUFFIX}"
        if not self._held.is_in_place(self.path):
            msg = f"{path} cannot be made: its folder was removed or replaced, or this process was forked off its owner"
            raise StoreError(msg)
        made: BlockFile | None = None
        try:
            made = BlockFile(path, create=True)
            is_reserved = not (reserve and nbytes) or made.allocate(nbytes)
        except OSError as failure:
            if made is not None:
                made.close()
                owner.discard(self._held.folder_fd, [path.name])
            raise StoreError(self._refusal(path, nbytes, failure)) from failure
        self._held.names.append(path.name)
        self._files.append(made)
        if not is_reserved:
            log.info("%s cannot be reserved on this file system; a full disk shows when it is written", path)
        return made

    def remove(self) -> None:
        """Wait for transfers, delete all files and the folder; a second call, or a forked child, does nothing."""
        files, self._files = self._files, []
        with ExitStack() as stack:
            stack.callback(self._undo)
            if self._held.pid == os.getpid():  # a forked child cannot wait for the transfers of its parent
                for file in files:
                    stack.callback(file.close)

    def _refusal(self, path: Path, nbytes: int, failure: OSError) -> str:
        try:
            free = f"{format_bytes(free_bytes(self.path))} ({free_bytes(self.path)} bytes)"
        except OSError:
            free = "unknown"
        advice = {
            errno.EEXIST: "give every swap file its own name",
            errno.EDQUOT: "your quota is used up; free some of it or name another disk (nvme_path)",
            errno.EFBIG: "files may not be so long; see ulimit -f, or use more ranks",
        }.get(failure.errno or 0, "free space, " + _CHOOSE if failure.errno == errno.ENOSPC else _CHOOSE)
        return (
            f"swap file {path} cannot be made: {failure.strerror or failure}; wanted {format_bytes(nbytes)} "
            f"({nbytes} bytes), free {free}; {advice}"
        )


class _Held:
    """Resources to be released at the end; apart from the folder object, so that its finalizer can hold it."""

    def __init__(self, root_fd: int, parent_fd: int, folder_fd: int, lock: OwnerLock, name: str) -> None:
        self.root_fd, self.parent_fd, self.folder_fd = root_fd, parent_fd, folder_fd
        self.lock, self.name, self.pid = lock, name, os.getpid()
        self.names: list[str] = []

    def is_in_place(self, path: Path) -> bool:
        """True if `path` still leads to this folder, and this process made it."""
        if self.folder_fd < 0 or self.pid != os.getpid():
            return False
        try:
            return os.path.samestat(path.lstat(), os.fstat(self.folder_fd))
        except OSError:
            return False

    def remove(self) -> None:
        """Delete the files of this process and release the lock."""
        if self.pid != os.getpid() or self.folder_fd < 0:
            return
        failures = owner.discard(self.folder_fd, self.names)
        # The lock goes last: while it is held no other run takes this folder for left over.
        failures += owner.discard(self.folder_fd, [OWNER_FILE])
        try:
            os.rmdir(self.name, dir_fd=self.parent_fd)
        except FileNotFoundError:
            pass
        except OSError as failure:
            failures.append(failure)
        if failures:
            log.warning("swap folder %s was not wholly removed: %s; delete it by hand", self.name, failures[0])
        self.lock.close()
        with contextlib.suppress(OSError):
            os.rmdir(parent_name(), dir_fd=self.root_fd)  # refused while it holds others
        for fd in (self.folder_fd, self.parent_fd, self.root_fd):
            os.close(fd)
        self.folder_fd = -1


def _make(root: Path, name: str) -> _Held:
    """The folder, made and owned by this process.

    Raises:
        StoreError: it cannot be made.
    """
    with ExitStack() as stack:
        try:
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else failure
            advice = _MAKE if isinstance(failure, (FileNotFoundError, NotADirectoryError)) else _CHOOSE
            msg = f"swap folders cannot be made below {str(root)!r}: {reason}; {advice}"
            raise StoreError(msg) from failure
        stack.callback(os.close, root_fd)
        try:
            parent_fd = _make_parent(root_fd, root, name)
            stack.callback(os.close, parent_fd)
            stack.callback(_unmake, parent_fd, name)
            folder_fd = os.open(name, owner.FOLDER_FLAGS, dir_fd=parent_fd)
            stack.callback(os.close, folder_fd)
            stack.callback(owner.discard, folder_fd, [OWNER_FILE])
            lock = owner.own(folder_fd)
        except OSError as failure:
            advice = "every folder needs its own name" if failure.errno == errno.EEXIST else _CHOOSE
            msg = f"swap folder {root / parent_name() / name} cannot be made: {failure.strerror}; {advice}"
            raise StoreError(msg) from failure
        stack.pop_all()
    return _Held(root_fd, parent_fd, folder_fd, lock, name)


def _make_parent(root_fd: int, root: Path, name: str) -> int:
    """Make the user's folder, where it is missing, and `name` in it; returns the descriptor of the user's folder."""
    for attempt in range(1, _ATTEMPTS + 1):
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent_name(), 0o700, dir_fd=root_fd)
        try:
            fd = os.open(parent_name(), owner.FOLDER_FLAGS, dir_fd=root_fd)
        except FileNotFoundError:
            continue  # another run ended and took the empty folder with it
        try:
            _check_private(fd, root)
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileNotFoundError:
            os.close(fd)
            if attempt == _ATTEMPTS:
                raise
        except BaseException:
            os.close(fd)
            raise
        else:
            return fd
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), parent_name())


def _check_private(parent_fd: int, root: Path) -> None:
    if not owner.is_private(parent_fd):
        msg = (
            f"{root / parent_name()} belongs to another user or may be written by others; delete it or chmod go-w it, "
            f"or name another folder (nvme_path)"
        )
        raise StoreError(msg)


def _unmake(parent_fd: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent_fd)


def clean_stale(root: Path) -> list[str]:
    """Remove rank folders below `root` that runs of this user left on this host when they were killed.

    A folder goes only if it looks exactly like one of ours and the lock of its owner is free, which means that the
    owner is dead. Folders of other hosts stay, because a network file system may not show their locks; old ones
    are named in a warning. Any number of runs may clean at once.

    Returns:
        Paths of the removed folders; none where `root` cannot be read.
    """
    removed: list[str] = []
    foreign: list[str] = []
    with ExitStack() as stack:
        try:
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root_fd)
            parent_fd = stack.enter_context(owner.opened(parent_name(), root_fd))
            names = _rank_folders(parent_fd) if owner.is_private(parent_fd) else []
        except (OSError, ValueError):
            return []
        is_network = mount_of(root).is_network
        for name in names:
            path = str(root / parent_name() / name)
            with contextlib.suppress(OSError), owner.opened(name, parent_fd) as folder_fd:
                if _clean(folder_fd, path, foreign, is_network=is_network):
                    os.rmdir(name, dir_fd=parent_fd)
                    removed.append(path)
        with contextlib.suppress(OSError):
            os.rmdir(parent_name(), dir_fd=root_fd)
    if removed:
        log.info("removed %d swap folders of runs that were killed: %s", len(removed), ", ".join(removed))
    if foreign:
        log.warning(
            "swap folders of other hosts, or without file locks, older than %.0f hours: %s; delete them if their runs "
            "have ended",
            FOREIGN_SECONDS / 3600, ", ".join(foreign),
        )  # fmt: skip
    return removed


def _rank_folders(parent_fd: int) -> list[str]:
    return sorted(filter(_RANK_FOLDER.fullmatch, os.listdir(parent_fd)))


def _clean(folder_fd: int, path: str, foreign: list[str], *, is_network: bool) -> bool:
    """Empty a folder if its owner is dead; True if it is empty now. Folders that are only reported go to `foreign`."""
    if os.fstat(folder_fd).st_uid != os.geteuid():
        return False
    with _looked_at(folder_fd) as lock:
        identity = lock.read() if lock is not None and lock.is_still(folder_fd) else None
        age = time.time() - os.fstat(folder_fd if lock is None else lock.fd).st_mtime
        if identity is None:
            # Being made, being removed, or its process died within these microseconds; no swap file is there yet.
            is_over = age > UNFINISHED_SECONDS and set(os.listdir(folder_fd)) <= {OWNER_FILE}
            return is_over and (lock is None or lock.take()) and not owner.discard(folder_fd, [OWNER_FILE])
        if not identity.is_here(is_network=is_network):
            if age > FOREIGN_SECONDS:
                foreign.append(path)
            return False
        if lock is None or not lock.take() or not lock.is_still(folder_fd):
            return False
        names = os.listdir(folder_fd)
        odd = [name for name in names if name != OWNER_FILE and not _is_swap_file(name, folder_fd)]
        if odd:
            log.warning("%s was left by a killed run and holds %r, which is not ours; delete it by hand", path, odd[0])
            return False
        return not owner.discard(folder_fd, [*(name for name in names if name != OWNER_FILE), OWNER_FILE])


@contextmanager
def _looked_at(folder_fd: int) -> Iterator[OwnerLock | None]:
    lock = owner.look(folder_fd)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.close()


def _is_swap_file(name: str, folder_fd: int) -> bool:
    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    return bool(_SWAP_FILE.fullmatch(name)) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
