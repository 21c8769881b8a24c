"""Private folders of scratch files: one per rank and run, deleted at the end, cleaned up after a killed run.

    root/PREFIX-USERID/RUN.rankN/owner.json, files of a kind

Scratch files are of a running process. Nothing in them survives it, and nobody but their user can read them.
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
from dataclasses import dataclass
from pathlib import Path

from mpispeed.base.errors import StoreError
from mpispeed.store import owner
from mpispeed.store.mounts import mount_of
from mpispeed.store.owner import OWNER_FILE, OwnerLock

log = logging.getLogger(__name__)

UNFINISHED_SECONDS = 3600.0
"""Age from which a folder without a complete owner file is left over and not just being made."""

FOREIGN_SECONDS = 24 * 3600.0
"""Age from which folders of other hosts, whose locks may not be seen here, are pointed out."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")
_RANK_FOLDER = re.compile(_RUN.pattern + r"\.rank[0-9]{1,9}")
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of scratch files.

    Attributes:
        word: what messages call it: "swap" of swap files and swap folders.
        key: of the settings, that names the root.
        prefix: of the folder below the root.
        files: pattern of names of its files.
    """

    word: str
    key: str
    prefix: str
    files: re.Pattern[str]

    @property
    def parent_name(self) -> str:
        """Name of the folder below the root that holds this user's rank folders.

        One per user, so that on a shared root nobody can block others by being first.
        """
        return f"{self.prefix}-{os.geteuid()}"

    @property
    def make(self) -> str:
        """Advice for a root that is not there."""
        return f"make it on every node, or name a folder that is there ({self.key})"

    @property
    def choose(self) -> str:
        """Advice for a root that cannot be used."""
        return f"name a folder of a local disk that you may write to ({self.key})"


def run_name() -> str:
    """A unique name of a run: host, process and a random part. One rank makes it and shares it."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:60] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(6)}"


class PrivateFolder:
    """A private folder of one rank of one run below a root that the user named.

    It is deleted by `remove`, when the object is collected, or at the end of the process; a forked child deletes
    nothing. After SIGKILL or a crash `clean_stale` of a later run on that host does it.

    Args:
        root: an existing folder.
        run: the result of `run_name`, the same on all ranks.
        rank: number of this rank.
        kind: of its files.

    Raises:
        StoreError: the root cannot be used; says why and what to do.
    """

    def __init__(self, root: Path, run: str, rank: int, kind: Kind) -> None:
        if not _RUN.fullmatch(run) or rank < 0:
            named = f"{kind.word} folder of run {run!r}, rank {rank}"
            msg = f"{named}: runs are named by letters, digits and ._-, ranks from 0"
            raise StoreError(msg)
        self.root, self.kind = root, kind
        name = f"{run}.rank{rank}"
        self.path = root / kind.parent_name / name
        self._held = _make(root, name, kind)
        self._undo = weakref.finalize(self, self._held.remove)
        if not self._held.lock.is_held and rank == 0:
            log.warning(
                "%s has no file locks: %s files of a run that is killed have to be deleted by hand", root, kind.word
            )

    @property
    def is_own(self) -> bool:
        """False in a forked child."""
        return self._held.pid == os.getpid()

    @property
    def is_in_place(self) -> bool:
        """True if the path still leads to this folder, and this process made it."""
        return self._held.is_in_place(self.path)

    def add(self, name: str) -> None:
        """Delete the file `name` of this folder with it."""
        self._held.names.append(name)

    def discard(self, name: str) -> None:
        """Delete one file now."""
        owner.discard(self._held.folder_fd, [name])

    def remove(self) -> None:
        """Delete all files and the folder; a second call, or a forked child, does nothing."""
        self._undo()


class _Held:
    """Resources to be released at the end; apart from the folder object, so that its finalizer can hold it."""

    def __init__(self, root_fd: int, parent_fd: int, folder_fd: int, lock: OwnerLock, name: str, kind: Kind) -> None:
        self.root_fd, self.parent_fd, self.folder_fd = root_fd, parent_fd, folder_fd
        self.lock, self.name, self.kind, self.pid = lock, name, kind, os.getpid()
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
            log.warning(
                "%s folder %s was not wholly removed: %s; delete it by hand", self.kind.word, self.name, failures[0]
            )
        self.lock.close()
        with contextlib.suppress(OSError):
            os.rmdir(self.kind.parent_name, dir_fd=self.root_fd)  # refused while it holds others
        for fd in (self.folder_fd, self.parent_fd, self.root_fd):
            os.close(fd)
        self.folder_fd = -1


def _make(root: Path, name: str, kind: Kind) -> _Held:
    """The folder, made and owned by this process.

    Raises:
        StoreError: it cannot be made.
    """
    with ExitStack() as stack:
        try:
            root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else failure
            advice = kind.make if isinstance(failure, (FileNotFoundError, NotADirectoryError)) else kind.choose
            msg = f"{kind.word} folders cannot be made below {str(root)!r}: {reason}; {advice}"
            raise StoreError(msg) from failure
        stack.callback(os.close, root_fd)
        try:
            parent_fd = _make_parent(root_fd, root, name, kind)
            stack.callback(os.close, parent_fd)
            stack.callback(_unmake, parent_fd, name)
            folder_fd = os.open(name, owner.FOLDER_FLAGS, dir_fd=parent_fd)
            stack.callback(os.close, folder_fd)
            stack.callback(owner.discard, folder_fd, [OWNER_FILE])
            lock = owner.own(folder_fd)
        except OSError as failure:
            advice = "every folder needs its own name" if failure.errno == errno.EEXIST else kind.choose
            msg = f"{kind.word} folder {root / kind.parent_name / name} cannot be made: {failure.strerror}; {advice}"
            raise StoreError(msg) from failure
        stack.pop_all()
    return _Held(root_fd, parent_fd, folder_fd, lock, name, kind)


def _make_parent(root_fd: int, root: Path, name: str, kind: Kind) -> int:
    """Make the user's folder, where it is missing, and `name` in it; returns the descriptor of the user's folder."""
    for attempt in range(1, _ATTEMPTS + 1):
        with contextlib.suppress(FileExistsError):
            os.mkdir(kind.parent_name, 0o700, dir_fd=root_fd)
        try:
            fd = os.open(kind.parent_name, owner.FOLDER_FLAGS, dir_fd=root_fd)
        except FileNotFoundError:
            continue  # another run ended and took the empty folder with it
        try:
            _check_private(fd, root, kind)
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
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), kind.parent_name)


def _check_private(parent_fd: int, root: Path, kind: Kind) -> None:
    if not owner.is_private(parent_fd):
        msg = (
            f"{root / kind.parent_name} belongs to another user or may be written by others; delete it or chmod go-w "
            f"it, or name another folder ({kind.key})"
        )
        raise StoreError(msg)


def _unmake(parent_fd: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent_fd)


def clean_stale(root: Path, kind: Kind) -> list[str]:
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
            parent_fd = stack.enter_context(owner.opened(kind.parent_name, root_fd))
            names = _rank_folders(parent_fd) if owner.is_private(parent_fd) else []
        except (OSError, ValueError):
            return []
        is_network = mount_of(root).is_network
        for name in names:
            path = str(root / kind.parent_name / name)
            with contextlib.suppress(OSError), owner.opened(name, parent_fd) as folder_fd:
                if _clean(folder_fd, path, foreign, kind, is_network=is_network):
                    os.rmdir(name, dir_fd=parent_fd)
                    removed.append(path)
        with contextlib.suppress(OSError):
            os.rmdir(kind.parent_name, dir_fd=root_fd)
    if removed:
        log.info("removed %d %s folders of runs that were killed: %s", len(removed), kind.word, ", ".join(removed))
    if foreign:
        log.warning(
            "%s folders of other hosts, or without file locks, older than %.0f hours: %s; delete them if their runs "
            "have ended",
            kind.word, FOREIGN_SECONDS / 3600, ", ".join(foreign),
        )  # fmt: skip
    return removed


def _rank_folders(parent_fd: int) -> list[str]:
    return sorted(filter(_RANK_FOLDER.fullmatch, os.listdir(parent_fd)))


def _clean(folder_fd: int, path: str, foreign: list[str], kind: Kind, *, is_network: bool) -> bool:
    """Empty a folder if its owner is dead; True if it is empty now. Folders that are only reported go to `foreign`."""
    if os.fstat(folder_fd).st_uid != os.geteuid():
        return False
    with _looked_at(folder_fd) as lock:
        identity = lock.read() if lock is not None and lock.is_still(folder_fd) else None
        age = time.time() - os.fstat(folder_fd if lock is None else lock.fd).st_mtime
        if identity is None:
            # Being made, being removed, or its process died within these microseconds; no file is there yet.
            is_over = age > UNFINISHED_SECONDS and set(os.listdir(folder_fd)) <= {OWNER_FILE}
            return is_over and (lock is None or lock.take()) and not owner.discard(folder_fd, [OWNER_FILE])
        if not identity.is_here(is_network=is_network):
            if age > FOREIGN_SECONDS:
                foreign.append(path)
            return False
        if lock is None or not lock.take() or not lock.is_still(folder_fd):
            return False
        names = os.listdir(folder_fd)
        odd = [name for name in names if name != OWNER_FILE and not _is_file_of(kind, name, folder_fd)]
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


def _is_file_of(kind: Kind, name: str, folder_fd: int) -> bool:
    status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    return bool(kind.files.fullmatch(name)) and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
