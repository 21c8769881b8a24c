"""Memory of a process: limits, use, and kills by the kernel when none was left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.cgroups import MemoryGroups, kib_to_bytes, read_fields, read_pairs, read_text, to_number
from mpispeed.base.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of one process and of its control groups, at one moment; None for unknown values.

    `limit_bytes` is the smallest limit above the process, `group` the control group that has it, `usage_bytes` and
    `group_peak_bytes` are that group's. `kills` counts processes that the kernel has ever killed for lack of memory up
    to that group, `node_kills` those on the node; `limit_hits` counts how often that group's limit left nothing to
    give (version 2 only). `killed_bytes` is the memory that the process had when the kernel killed it, if the
    kernel's log can be read and has it; `killed_in_group` is True if a group's limit was the reason, not the
    node's memory.
    """

    pid: int
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    address_limit_bytes: int | None = None
    group: str = ""
    limit_bytes: int | None = None
    usage_bytes: int | None = None
    group_peak_bytes: int | None = None
    kills: int | None = None
    limit_hits: int | None = None
    node_kills: int | None = None
    killed_bytes: int | None = None
    killed_in_group: bool | None = None
    available_bytes: int | None = None
    total_bytes: int | None = None
    shm_free_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self)

    def describe(self) -> str:
        """One line of the known facts."""
        group = f"of {self.group}" if self.group else "of its control group"
        parts = (
            ("resident", self.resident_bytes, ""),
            ("peak", self.peak_bytes, ""),
            ("limit", self.limit_bytes, group),
            ("used", self.usage_bytes, f"{group} in all"),
            ("free", self.available_bytes, "on the node"),
        )
        texts = [f"{name} {format_bytes(size)} {where}".strip() for name, size, where in parts if size is not None]
        return ", ".join(texts) or "nothing is known of its memory"


def memory_facts(pid: int, *, proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> MemoryFacts:
    """Look at a process now; for one that has ended only the node's facts are left: keep its `Groups`."""
    return Groups.of(pid, proc=proc).facts(pid, shm=shm)


def kernel_kill(pid: int, path: Path = Path("/dev/kmsg")) -> tuple[int, bool] | None:
    """Bytes of a process when the kernel killed it lately for lack of memory, and if a group's limit was the reason.

    None if the kernel's log tells of nothing.

    Only root may read the log on many systems, and within a container processes have other numbers there.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = None
    oldest_us = 1e6 * (time.clock_gettime(time.CLOCK_BOOTTIME) - _RECENT_SECONDS)
    try:
        for record in _records(handle):
            kill = _KILL.search(record)
            if kill and int(kill["pid"]) == pid and int(kill["time_us"]) > oldest_us:
                held = sum(int(size) << 10 for size in re.findall(r"(?:anon|shmem)-rss:(\d+)kB", record))
                found = held, "Memory cgroup" in record
    finally:
        os.close(handle)
    return found


def _records(handle: int) -> Iterator[str]:
    """Records of the kernel's log, to its end; one that was overwritten meanwhile is left out."""
    while True:
        try:
            data = os.read(handle, 8192)
        except BrokenPipeError:
            continue
        except OSError:
            return
        if not data:
            return
        yield data.decode(errors="replace")


_KILL = re.compile(r"^\d+,\d+,(?P<time_us>\d+),[^;]*;.*Killed process (?P<pid>\d+) ")
_RECENT_SECONDS = 600.0
"""Older records do not count, because process numbers are reused."""


@dataclass(frozen=True, slots=True)
class Groups(MemoryGroups):
    """Memory groups of a process, and the facts that a report has of it."""

    def facts(self, pid: int, *, shm: Path = Path("/dev/shm")) -> MemoryFacts:
        """Look at the process, if it is still there, its groups and the node."""
        status = dict(read_fields(self.proc / str(pid) / "status"))
        node = dict(read_fields(self.proc / "meminfo"))
        folder, limit = self.limiting()
        killed = None if "VmRSS" in status else kernel_kill(pid)
        return MemoryFacts(
            pid=pid,
            resident_bytes=kib_to_bytes(status.get("VmRSS")),
            peak_bytes=kib_to_bytes(status.get("VmHWM")),
            address_limit_bytes=_address_limit(self.proc / str(pid) / "limits"),
            group=self.name(folder),
            limit_bytes=limit,
            usage_bytes=self.usage(folder),
            group_peak_bytes=self.peak(folder),
            kills=self.kills(folder),
            limit_hits=None if folder is None or self.is_version_1 else self.count(folder, "oom"),
            node_kills=to_number(dict(read_pairs(self.proc / "vmstat")).get("oom_kill")),
            killed_bytes=killed[0] if killed else None,
            killed_in_group=killed[1] if killed else None,
            available_bytes=kib_to_bytes(node.get("MemAvailable")),
            total_bytes=kib_to_bytes(node.get("MemTotal")),
            shm_free_bytes=_free(shm),
        )


def _address_limit(path: Path) -> int | None:
    for line in read_text(path).splitlines():
        if line.startswith("Max address space"):
            return to_number(line.split()[3])
    return None


def _free(shm: Path) -> int | None:
    try:
        facts = os.statvfs(shm)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
