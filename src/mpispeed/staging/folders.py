"""Folders of staged environments on a node: made for one user alone, locked while in use, removed afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpispeed.base.errors import StagingError

PREFIX = "mpispeed-env-"
"""Beginning of the names of folders: PREFIX, number of the user, number of the job, eight random letters."""

GRACE_SECONDS = 600.0
"""Age up to which a folder without a lock is left alone: its job may be between two of its steps."""

_DAY_SECONDS = 86400.0
_LONGEST_LEASE = 400
_NAME = re.compile(PREFIX + r"(\d+)-([A-Za-z0-9_.]+)-([a-z0-9]{8})")


def job_of(name: str) -> str:
    """The number of the job in the name of a folder.

    Raises:
        StagingError: it is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[1] != str(os.geteuid()):
        msg = f"{name!r} is no folder of an environment of user {os.geteuid()} ({PREFIX}USER-JOB-LETTERS)"
        raise StagingError(msg)
    return match[2]


def name_for(job: str) -> str:
    """A new name for the folders of a job, the same on all of its nodes."""
    word = re.sub(r"[^A-Za-z0-9_.]", "_", job) or "0"
    return f"{PREFIX}{os.geteuid()}-{word}-{secrets.token_hex(4)}"


def make_folder(path: Path, lease: str = "") -> None:
    """Make the folder of a job, with its lock.

    Args:
        path: of the folder.
        lease: how often its SLURM job was requeued; then the host of its launcher, if that holds the lock as long as it
            lives. Other starts of the job leave the folder alone; empty: they may remove it when it is old.

    Raises:
        StagingError: there is something of that name.
    """
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        msg = f"{path} cannot be made: {error.strerror}"
        raise StagingError(msg) from None
    try:
        file = os.open(path / "lock", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as lock:
            lock.write(lease)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        msg = f"{path}/lock cannot be made: {error.strerror}"
        raise StagingError(msg) from None


def check_folder(path: Path) -> None:
    """Refuse what is not a folder of this user alone, made by us.

    Raises:
        StagingError: with the reason.
    """
    job_of(path.name)
    try:
        status = os.lstat(path)
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise StagingError(msg) from None
    if not stat.S_ISDIR(status.st_mode):
        msg = f"{path} is no folder but a link or a file, which somebody has put there"
        raise StagingError(msg)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        msg = f"{path} belongs to user {status.st_uid} (mode {status.st_mode & 0o777:o}), not to us alone"
        raise StagingError(msg)


@contextlib.contextmanager
def locked(path: Path, *, is_exclusive: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder; False, which is of the exclusive one only, if others hold it.

    Who wants to share it waits: the exclusive one is held for the moment of a look, or until the folder is removed.
    """
    file = os.open(path / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        is_ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if is_exclusive else fcntl.LOCK_SH)
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(file)


def remove(path: Path) -> None:
    """Remove the folder of a job; nothing happens if it is gone.

    Raises:
        StagingError: it is not ours, or cannot be removed.
    """
    if not os.path.lexists(path):
        return
    check_folder(path)
    for _ in range(3):  # a process that is about to end may still write bytecode
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        time.sleep(0.2)
    msg = f"{path} cannot be removed; remove it yourself"
    raise StagingError(msg)


def left_over(places: Sequence[Path], job: str = "", lease: str = "") -> Iterator[Path]:
    """Folders of this user that no process uses and whose job is over.

    Those of `job` itself, which asks, are left over from before it was requeued, or from a launcher on this node that
    was killed, which is seen by its lock. Others may wait for their ranks: a batch script that staged holds no lock.

    While the caller has one, no process can begin to use it: it is to be removed before the next one is asked for.
    """
    for place in places:
        try:
            names = sorted(path.name for path in place.iterdir())
        except OSError:
            continue
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or match[1] != str(os.geteuid()):
                continue
            with contextlib.suppress(StagingError, OSError):
                check_folder(place / name)
                if _age(place / name) < GRACE_SECONDS:
                    continue
                with contextlib.ExitStack() as held:
                    has_lock = os.path.lexists(place / name / "lock")
                    if has_lock and not held.enter_context(locked(place / name, is_exclusive=True)):
                        continue
                    is_own = match[2] == job and job.isdigit()
                    if has_lock and is_own and _is_leased(place / name, lease):
                        continue
                    if not has_lock or is_own or _is_over(match[2], _age(place / name)):
                        yield place / name


def _is_leased(path: Path, lease: str) -> bool:
    """True if a folder of our own job, whose lock nobody holds on this node, may still be used by a start of it."""
    file = os.open(path / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(file, encoding="utf-8", errors="replace") as lock:
        restarts, _, launcher = lock.read(_LONGEST_LEASE).partition(" ")
    return bool(restarts) and restarts == lease.partition(" ")[0] and launcher != socket.gethostname()


def _age(path: Path) -> float:
    """Seconds since somebody last had to do with a folder: an archive may be on its way into it for long."""
    dates = []
    for name in ("lock", "archive.tar"):
        with contextlib.suppress(FileNotFoundError):
            dates.append((path / name).lstat().st_mtime)
    return time.time() - max(dates, default=path.stat().st_mtime)


def _is_over(job: str, age_seconds: float) -> bool:
    return age_seconds >= GRACE_SECONDS and (not job.isdigit() or _has_ended(job, age_seconds))


def _has_ended(job: str, age_seconds: float) -> bool:
    """True if SLURM says that a job is over; without an answer, after a day without a lock."""
    words = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return age_seconds > _DAY_SECONDS
    if said.returncode:
        return "invalid job id" in said.stderr.lower() or age_seconds > _DAY_SECONDS
    return said.stdout.split()[:1] in ([], ["COMPLETED"], ["FAILED"], ["CANCELLED"], ["TIMEOUT"], ["NODE_FAIL"])
