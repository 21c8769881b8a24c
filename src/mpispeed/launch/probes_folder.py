"""Probe of a folder: locks, renames, mapped files, direct I/O, speed. Runs in a process of its own.

    python -m mpispeed.launch.probes_folder FOLDER

A file system that hangs then takes that process with it, not the doctor.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpispeed.base.units import format_bytes
from mpispeed.launch.findings import Finding, Verdict, from_dict
from mpispeed.launch.probes import ask

AREA = "folder"
SECONDS = 90.0
LEAST_BYTES = 1 << 30
LEAST_INODES = 1000
TRIAL_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20
TRIAL_SECONDS = 8.0
SLOW_SYNC_SECONDS = 0.5
RENAMES = 50
SEEN_SECONDS = 5.0


def check_folder(folder: str, *, is_asked: bool = True) -> list[Finding]:
    """All findings on the folder; a default folder that cannot be used is no failure."""
    found, reason = ask(["-m", "mpispeed.launch.probes_folder", folder], seconds=SECONDS)
    rows = [_no_answer(folder, reason)] if not isinstance(found, list) else [from_dict(row) for row in found]
    is_milder = not is_asked and [row.verdict for row in rows] == [Verdict.FAIL]
    return [replace(row, verdict=Verdict.WARN) for row in rows] if is_milder else rows


def _no_answer(folder: str, reason: str) -> Finding:
    cure = "choose another folder with --folder; if the file system hangs, ask its administrators"
    return Finding(AREA, "folder", Verdict.FAIL, f"{folder}: {reason}", cure)


def look_at(folder: Path) -> Iterator[Finding]:
    """Try everything in a new folder below `folder`."""
    try:
        room = tempfile.TemporaryDirectory(prefix=".mpispeed-doctor-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        cure = "choose a folder that you may write to with --folder"
        yield Finding(AREA, "folder", Verdict.FAIL, f"{folder}: nothing can be written: {error.strerror}", cure)
        return
    with room as name:
        yield from _look_at_space(folder)
        # Before anything is imported that starts threads: some of these fork.
        for what, trial, cure in _TRIALS:
            yield _tried(what, trial, Path(name), cure)
        yield _speed(Path(name))
    yield from _io_findings(folder)


def _look_at_space(folder: Path) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{format_bytes(free)} free of {format_bytes(total)}; quotas are not counted"
    is_enough = free >= LEAST_BYTES
    yield Finding(
        AREA, "free space", Verdict.OK if is_enough else Verdict.WARN, text,
        "" if is_enough else "remove files, or choose another folder with --folder",
    )  # fmt: skip
    if status.f_files == 0:
        yield Finding(AREA, "inodes", Verdict.INFO, "this file system does not count them")
    else:
        is_enough = status.f_favail >= LEAST_INODES
        text = f"{status.f_favail} free of {status.f_files}"
        cure = "" if is_enough else "remove small files: no more can be created, however much space is free"
        yield Finding(AREA, "inodes", Verdict.OK if is_enough else Verdict.WARN, text, cure)


def _tried(what: str, trial: Callable[[Path], str], room: Path, cure: str) -> Finding:
    """Finding of a trial; `trial` returns its observation, or raises `OSError` with the reason."""
    try:
        return Finding(AREA, what, Verdict.OK, trial(room))
    except OSError as error:
        return Finding(AREA, what, Verdict.WARN, error.strerror or str(error), cure)


# -- trials ----------------------------------------------------------------------------------------------------------


def _in_child(body: Callable[[], bool]) -> bool:
    """Return the answer of `body` in a forked process."""
    child = os.fork()
    if child == 0:
        code = 2
        with contextlib.suppress(BaseException):
            code = 0 if body() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _try_lock(lock: Callable[[int, int], None], path: Path) -> str:
    def is_refused() -> bool:
        with path.open("r+b") as own:
            try:
                lock(own.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
            return False

    path.touch()
    with path.open("r+b") as file:
        lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _in_child(is_refused):
            raise OSError(0, "another process got the same lock")
        lock(file.fileno(), fcntl.LOCK_UN)
    return "keeps other processes of this node out"


def _try_flock(room: Path) -> str:
    return _try_lock(fcntl.flock, room / "flock")


def _try_fcntl(room: Path) -> str:
    return _try_lock(fcntl.lockf, room / "fcntl")


def _try_rename(room: Path) -> str:
    """Check that readers see the old file or the new one, never none or a part."""
    target, fresh = room / "renamed", room / "fresh"
    words = [b"a" * 4096, b"b" * 4096]
    target.write_bytes(words[0])
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            end = time.monotonic() + SEEN_SECONDS
            while time.monotonic() < end and not (room / "done").exists():
                if target.read_bytes() not in words:
                    os._exit(1)
            code = 0
        os._exit(code)
    try:
        for number in range(RENAMES):
            fresh.write_bytes(words[number % 2])
            fresh.replace(target)
    finally:
        (room / "done").touch()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(0, "a reader found no file, or half of one, while it was replaced")
    return f"atomic in {RENAMES} trials with a reader"


def _try_mmap(room: Path) -> str:
    path = room / "mapped"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:

        def write() -> bool:
            page[:5] = b"heard"
            return True

        if not _in_child(write) or page[:5] != b"heard":
            raise OSError(0, "a process does not see what another writes into a shared mapping")
        page.flush()
    if path.read_bytes()[:5] != b"heard":
        raise OSError(0, "what is written through a mapping is not in the file")
    return "shared between processes"


def _try_sync(room: Path) -> str:
    with (room / "synced").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        begin = time.perf_counter()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    if seconds > SLOW_SYNC_SECONDS:
        raise OSError(0, f"1 MiB took {seconds:.2f} s")
    return f"1 MiB in {1000 * seconds:.1f} ms"


_NO_LOCKS = "mount it with locks (lustre: -o flock), or keep swap files and checkpoints elsewhere"
_TRIALS: tuple[tuple[str, Callable[[Path], str], str], ...] = (
    ("flock locks", _try_flock, _NO_LOCKS),
    ("fcntl locks", _try_fcntl, _NO_LOCKS),
    ("rename", _try_rename, "a checkpoint may be seen half done here; keep checkpoints elsewhere"),
    ("mmap", _try_mmap, "logs of hangs and swap files want it: set the folder of the run to another file system"),
    ("fsync", _try_sync, "every checkpoint waits for it several times; choose a faster file system"),
)


def _speed(room: Path) -> Finding:
    """Measure one process that writes, with fsync, and reads again, with the cache dropped."""
    path, chunk = room / "speed", os.urandom(CHUNK_BYTES)
    try:
        status = os.statvfs(room)
        size = min(TRIAL_BYTES, status.f_bavail * status.f_frsize // 4) // CHUNK_BYTES * CHUNK_BYTES
        if not size:
            return Finding(AREA, "speed", Verdict.INFO, "too little space to try it")
        written, seconds = _time_write(path, chunk, size)
        read, read_seconds = _time_read(path)
    except OSError as error:
        return Finding(AREA, "speed", Verdict.WARN, f"the trial failed: {error.strerror}", "see free space and quotas")
    rates = format_bytes(written / seconds), format_bytes(read / read_seconds)
    text = f"one process: write {rates[0]}/s with fsync, read {rates[1]}/s ({format_bytes(written)})"
    return Finding(AREA, "speed", Verdict.INFO, text)


def _time_write(path: Path, chunk: bytes, size: int) -> tuple[int, float]:
    begin, written = time.perf_counter(), 0
    with path.open("wb", buffering=0) as file:
        while written < size and time.perf_counter() - begin < TRIAL_SECONDS:
            written += file.write(chunk)
        os.fsync(file.fileno())
    return written, max(time.perf_counter() - begin, 1e-9)


def _time_read(path: Path) -> tuple[int, float]:
    read = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while time.perf_counter() - begin < TRIAL_SECONDS:
            part = file.read(CHUNK_BYTES)
            if not part:
                break
            read += len(part)
    return read, max(time.perf_counter() - begin, 1e-9)


# -- what the package says of it -------------------------------------------------------------------------------------


def _io_findings(folder: Path) -> Iterator[Finding]:
    from mpispeed.native.block_file import kernel_refusal, probe  # late: numpy starts threads
    from mpispeed.store.mounts import mount_of

    mount = mount_of(folder)
    text = f"{folder} is {mount.type} on {mount.point}"
    if mount.is_memory:
        cure = "files there are host memory and gone with the node; keep checkpoints elsewhere"
        yield Finding(AREA, "file system", Verdict.WARN, text, cure)
    else:
        nodes = "several nodes may see it" if mount.is_network else "of this node alone, as a rule"
        yield Finding(AREA, "file system", Verdict.OK, f"{text}; {nodes}")
    try:
        here, uring = probe(folder), kernel_refusal("uring")
    except (OSError, ImportError) as error:
        yield Finding(AREA, "block I/O", Verdict.WARN, str(error), "swap files need it; see the compiled modules")
        return
    text = f'backend "{here.backend}", blocks of {here.alignment} bytes'
    yield Finding(
        AREA, "block I/O", Verdict.OK, f"{text}; {here.backend_reason}" if here.backend_reason else text,
    )  # fmt: skip
    cure = "" if here.is_direct else "swap files and checkpoints go through the page cache, which takes host memory"
    yield Finding(
        AREA, "O_DIRECT", Verdict.OK if here.is_direct else Verdict.INFO,
        here.direct_reason or "granted in this folder", cure,
    )  # fmt: skip
    yield Finding(AREA, "io_uring", Verdict.INFO, uring or 'usable when named as backend "uring"')


def main() -> None:
    """Write the findings of the folder named on the command line as one line of JSON."""
    rows: list[dict[str, Any]] = [finding.as_dict() for finding in look_at(Path(sys.argv[1]).absolute())]
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
