"""What limits the memory of a process, how much it took, and whether the kernel has killed for want of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.units import format_bytes

_UNLIMITED = 1 << 60
"""Version 1 writes a limit of about 2^63 where there is none."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of one process and of the groups it is counted in, at one moment; None is what cannot be known.

    `limit_bytes` is the smallest limit above the process, `group` the control group that has it, `usage_bytes` and
    `group_peak_bytes` that group's. `kills` and `node_kills` count processes that the kernel has ended for want of
    memory, the group's or the node's, up to that group, and on the node, ever; `limit_hits` counts how often that
    group's limit left nothing to give, which version 2 tells. `killed_bytes` is what the process held when the kernel
    ended it for that, if the kernel's log may be read and says so, and `killed_in_group` that a group was the reason,
    not the node.
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
        """One line of what is known."""
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
    """Look at a process now; of one that has ended only the node is known: keep the `Groups` it was in."""
    return Groups.of(pid, proc=proc).facts(pid, shm=shm)


def kernel_kill(pid: int, path: Path = Path("/dev/kmsg")) -> tuple[int, bool] | None:
    """What a process held when the kernel ended it for want of memory lately, in bytes, and whether of its group's.

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
"""Numbers of processes come back."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Control groups in which memory of a process is counted, from its own to the top.

    Kept by who wants to look at them after the process has gone; SLURM's of a job step live until the step ends.
    """

    folders: tuple[Path, ...]
    is_version_1: bool
    proc: Path = Path("/proc")

    @classmethod
    def of(cls, pid: int, *, proc: Path = Path("/proc")) -> Groups:
        """Find the groups of process `pid`; there are none where the kernel or a container hides them."""
        own = _lines(proc / str(pid) / "cgroup")
        mounts = list(_mounts(proc))
        for is_version_1 in (True, False):
            path = next((where for kinds, where in own if _is_memory(kinds, is_version_1)), None)
            mount = next((found for found in mounts if found[0] == is_version_1), None)
            if path is not None and mount is not None:
                folders = tuple(_climb(mount[2], mount[1], path))
                if any((folder / name).exists() for folder in folders for name in _FILES[is_version_1]["usage"]):
                    return cls(folders, is_version_1, proc)
        return cls((), False, proc)

    def facts(self, pid: int, *, shm: Path = Path("/dev/shm")) -> MemoryFacts:
        """Look at the process, if it is still there, its groups and the node."""
        status = dict(_fields(self.proc / str(pid) / "status"))
        node = dict(_fields(self.proc / "meminfo"))
        folder, limit = self._limiting()
        killed = None if "VmRSS" in status else kernel_kill(pid)
        return MemoryFacts(
            pid=pid,
            resident_bytes=_kib(status.get("VmRSS")),
            peak_bytes=_kib(status.get("VmHWM")),
            address_limit_bytes=_address_limit(self.proc / str(pid) / "limits"),
            group=self._name(folder),
            limit_bytes=limit,
            usage_bytes=self._read(folder, "usage"),
            group_peak_bytes=self._read(folder, "peak"),
            kills=self._kills(folder),
            limit_hits=None if folder is None or self.is_version_1 else self._count(folder, "oom"),
            node_kills=_number(dict(_pairs(self.proc / "vmstat")).get("oom_kill")),
            killed_bytes=killed[0] if killed else None,
            killed_in_group=killed[1] if killed else None,
            available_bytes=_kib(node.get("MemAvailable")),
            total_bytes=_kib(node.get("MemTotal")),
            shm_free_bytes=_free(shm),
        )

    def _limiting(self) -> tuple[Path | None, int | None]:
        """The group with the smallest limit; the innermost one where there is no limit."""
        limits = [(limit, place) for place, limit in enumerate(map(self._limit, self.folders)) if limit is not None]
        if limits:
            limit, place = min(limits)
            return self.folders[place], limit
        return (self.folders[0] if self.folders else None), None

    def _limit(self, folder: Path) -> int | None:
        limit = self._read(folder, "limit")
        return limit if limit is not None and limit < _UNLIMITED else None

    def _read(self, folder: Path | None, what: str) -> int | None:
        if folder is None:
            return None
        found = (_number(_text(folder / name)) for name in _FILES[self.is_version_1][what])
        return next((number for number in found if number is not None), None)

    def _kills(self, limiting: Path | None) -> int | None:
        """Kills up to the limiting group, because those above it have other jobs too.

        Version 2 counts a kill in all groups above, version 1 where it was.
        """
        if limiting is None:
            return None
        below = self.folders[: self.folders.index(limiting) + 1]
        known = [count for folder in below if (count := self._count(folder, "oom_kill")) is not None]
        return (sum(known) if self.is_version_1 else max(known)) if known else None

    def _count(self, folder: Path, event: str) -> int | None:
        name = "memory.oom_control" if self.is_version_1 else "memory.events"
        return _number(dict(_pairs(folder / name)).get(event))

    def _name(self, folder: Path | None) -> str:
        if folder is None:
            return ""
        top = self.folders[-1]
        return "/" + str(folder.relative_to(top)) if folder != top else "/"


_FILES: dict[bool, dict[str, tuple[str, ...]]] = {
    True: {
        "limit": ("memory.limit_in_bytes",),
        "usage": ("memory.usage_in_bytes",),
        "peak": ("memory.max_usage_in_bytes",),
    },
    False: {"limit": ("memory.max",), "usage": ("memory.current",), "peak": ("memory.peak",)},
}


def _is_memory(kinds: str, is_version_1: bool) -> bool:
    return "memory" in kinds.split(",") if is_version_1 else not kinds


def _climb(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Folders from a group to the top of what is mounted; a container sees a part of the tree, or only its own."""
    inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    names = [name for name in inside.split("/") if name not in ("", "..")]
    if not (mount / "/".join(names)).is_dir():
        names = []
    for depth in range(len(names), -1, -1):
        yield mount.joinpath(*names[:depth])


def _mounts(proc: Path) -> Iterator[tuple[bool, str, Path]]:
    """(version 1, part of the tree, where) of each mounted tree that can count memory."""
    for line in _text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            is_version_1 = kind[0] == "cgroup"
            if not is_version_1 or "memory" in kind[2].split(","):
                yield is_version_1, fields[3], Path(fields[4].replace("\\040", " "))


def _lines(path: Path) -> list[tuple[str, str]]:
    """(kinds, path) of each line of /proc/PID/cgroup."""
    found = (line.split(":", 2) for line in _text(path).splitlines())
    return [(fields[1], fields[2]) for fields in found if len(fields) == 3]


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        yield name, value.strip()


def _address_limit(path: Path) -> int | None:
    for line in _text(path).splitlines():
        if line.startswith("Max address space"):
            return _number(line.split()[3])
    return None


def _free(shm: Path) -> int | None:
    try:
        facts = os.statvfs(shm)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _kib(text: str | None) -> int | None:
    number = _number(text.split()[0]) if text else None
    return None if number is None else number << 10


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
