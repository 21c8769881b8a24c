"""Resources of a process on this node: cores, memory, limits, /dev/shm, the temporary folder."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mpispeed.base.units import format_bytes
from mpispeed.launch.env import usable_cores
from mpispeed.launch.findings import Finding, Verdict
from mpispeed.watchdog.memory import memory_facts

AREA = "machine"
GIB = 1 << 30
SHM_LEAST_BYTES = GIB
LOCKED_LEAST_BYTES = GIB
FILES_LEAST = 4096
TEMP_LEAST_BYTES = GIB


def check_machine() -> Iterator[Finding]:
    """All findings of this area."""
    yield check_cores()
    yield check_memory()
    yield check_shm(Path("/dev/shm"))
    yield check_temp(Path(tempfile.gettempdir()))
    yield from check_limits()


def check_cores() -> Finding:
    """Number of cores, and of threads that will be used."""
    cores, total = usable_cores(), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    text = f"{cores} of {total} usable by this process; OMP_NUM_THREADS {threads or 'unset'}"
    if threads.isdigit() and int(threads) > cores:
        return Finding(AREA, "cores", Verdict.WARN, text, f"unset OMP_NUM_THREADS, or set it to at most {cores}")
    return Finding(AREA, "cores", Verdict.OK, text)


def check_memory() -> Finding:
    """The smallest limit on memory, and the free memory."""
    facts = memory_facts(os.getpid())
    if facts.total_bytes is None:
        return Finding(AREA, "memory", Verdict.INFO, "this system does not tell (/proc/meminfo)")
    text = f"{format_bytes(facts.available_bytes or 0)} free of {format_bytes(facts.total_bytes)}"
    if facts.limit_bytes is None or facts.limit_bytes >= facts.total_bytes:
        text += "; no limit of a control group"
    else:
        text += f"; control group {facts.group} is limited to {format_bytes(facts.limit_bytes)}"
        if facts.usage_bytes is not None:
            text += f", of which {format_bytes(facts.usage_bytes)} are in use"
    if facts.address_limit_bytes is not None:
        text += f"; RLIMIT_AS {format_bytes(facts.address_limit_bytes)}"
        cure = "`ulimit -v` counts addresses, not memory: torch and MPI reserve many; set it to unlimited"
        return Finding(AREA, "memory", Verdict.WARN, text, cure)
    return Finding(AREA, "memory", Verdict.OK, text)


def check_shm(folder: Path) -> Finding:
    """Shared memory, through which ranks of a node exchange messages."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        cure = "MPI and torch exchange data of a node there; mount a tmpfs on it"
        return Finding(AREA, str(folder), Verdict.WARN, f"cannot be looked at: {error.strerror}", cure)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free >= SHM_LEAST_BYTES:
        return Finding(AREA, str(folder), Verdict.OK, text)
    cure = (
        "ranks of a node exchange large messages there: give a container more (--shm-size, --ipc=host), and remove "
        "what jobs that were killed have left"
    )
    return Finding(AREA, str(folder), Verdict.WARN, text, cure)


def check_temp(folder: Path) -> Finding:
    """Folder for temporary files."""
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(AREA, "temporary folder", Verdict.FAIL, f"{folder}: {error.strerror}", "set TMPDIR")
    text = f"{folder}, {format_bytes(free)} free"
    if free < TEMP_LEAST_BYTES:
        return Finding(AREA, "temporary folder", Verdict.WARN, text, "set TMPDIR to a folder of this node with room")
    return Finding(AREA, "temporary folder", Verdict.OK, text)


def check_limits() -> Iterator[Finding]:
    """Limits of the shell that are too low."""
    rows = (
        ("locked memory", resource.RLIMIT_MEMLOCK, LOCKED_LEAST_BYTES, True, "-l", "page-locked buffers and networks"),
        ("open files", resource.RLIMIT_NOFILE, FILES_LEAST, False, "-n", "checkpoints and many ranks"),
        ("processes", resource.RLIMIT_NPROC, FILES_LEAST, False, "-u", "threads of many ranks"),
    )
    for name, number, least, is_bytes, letter, user in rows:
        limit = resource.getrlimit(number)[0]
        said = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit) if is_bytes else str(limit)
        if limit == resource.RLIM_INFINITY or limit >= least:
            yield Finding(AREA, name, Verdict.OK, said)
        else:
            cure = f"raise it with `ulimit {letter}` or in limits.conf, for {user}"
            yield Finding(AREA, name, Verdict.WARN, said, cure)
