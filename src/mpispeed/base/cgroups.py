"""Memory limits and counters of a process's control groups (cgroups, version 1 and 2), from the kernel's files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_UNLIMITED = 1 << 60
"""A limit of at least so many bytes is none: version 1 writes the largest multiple of the page size."""

_USAGE = {True: "memory.usage_in_bytes", False: "memory.current"}
"""The file of a group's use, by "is version 1"; the version whose files are there counts the memory."""


@dataclass(frozen=True, slots=True)
class MemoryGroups:
    """Control groups in which memory of a process is counted, from its own to the top.

    Create it early to look at the groups after the process has gone; SLURM's of a job step live until the step ends.
    """

    folders: tuple[Path, ...]
    is_version_1: bool
    proc: Path = Path("/proc")

    @classmethod
    def of(cls, pid: int | str, *, proc: Path = Path("/proc")) -> Self:
        """Find the groups of process `pid`, a number or "self".

        There are none where the kernel or a container hides them.
        """
        own = _lines(proc / str(pid) / "cgroup")
        mounts = list(_mounts(proc))
        for is_version_1 in (True, False):
            path = next((where for kinds, where in own if _is_memory(kinds, is_version_1)), None)
            mount = next((found for found in mounts if found[0] == is_version_1), None)
            if path is not None and mount is not None:
                folders = tuple(_climb(mount[2], mount[1], path))
                if any((folder / _USAGE[is_version_1]).exists() for folder in folders):
                    return cls(folders, is_version_1, proc)
        return cls((), False, proc)

    def limiting(self) -> tuple[Path | None, int | None]:
        """The group with the smallest limit; the innermost one where there is no limit."""
        limits = [(limit, place) for place, limit in enumerate(map(self.limit, self.folders)) if limit is not None]
        if limits:
            limit, place = min(limits)
            return self.folders[place], limit
        return (self.folders[0] if self.folders else None), None

    def limit_file(self, folder: Path) -> Path:
        """The file that has the limit of a group."""
        return folder / ("memory.limit_in_bytes" if self.is_version_1 else "memory.max")

    def limit(self, folder: Path) -> int | None:
        """The limit of a group; None without one. Units: bytes."""
        limit = to_number(read_text(self.limit_file(folder)))
        return limit if limit is not None and limit < _UNLIMITED else None

    def usage(self, folder: Path | None) -> int | None:
        """Memory that processes of a group use, file cache included. Units: bytes."""
        return None if folder is None else to_number(read_text(folder / _USAGE[self.is_version_1]))

    def peak(self, folder: Path | None) -> int | None:
        """The most that a group has used. Units: bytes."""
        name = "memory.max_usage_in_bytes" if self.is_version_1 else "memory.peak"
        return None if folder is None else to_number(read_text(folder / name))

    def inactive_cache(self, folder: Path) -> int:
        """File cache of a group that the kernel would drop first. Units: bytes."""
        name = "total_inactive_file" if self.is_version_1 else "inactive_file"
        return to_number(dict(read_pairs(folder / "memory.stat")).get(name)) or 0

    def kills(self, limiting: Path | None) -> int | None:
        """Kills up to the limiting group, because those above it have other jobs too.

        Version 2 counts a kill in all groups above, version 1 where it was.
        """
        if limiting is None:
            return None
        below = self.folders[: self.folders.index(limiting) + 1]
        known = [count for folder in below if (count := self.count(folder, "oom_kill")) is not None]
        return (sum(known) if self.is_version_1 else max(known)) if known else None

    def count(self, folder: Path, event: str) -> int | None:
        """Number of events of a name in the kernel's list, such as oom_kill."""
        name = "memory.oom_control" if self.is_version_1 else "memory.events"
        return to_number(dict(read_pairs(folder / name)).get(event))

    def name(self, folder: Path | None) -> str:
        """The name of a group within the tree that this process sees; "" for None."""
        if folder is None:
            return ""
        top = self.folders[-1]
        return "/" + str(folder.relative_to(top)) if folder != top else "/"


@dataclass(frozen=True, slots=True)
class Limit:
    """Remainder of one memory limit of this machine. Units: bytes."""

    source: str
    bytes: int


def machine_limits(proc: Path = Path("/proc")) -> list[Limit]:
    """Remaining memory of this machine: MemAvailable, and the rest of every memory cgroup (v1, v2) of this process.

    File cache that a cgroup can drop counts as free, as it does in MemAvailable.
    """
    found = []
    available = kib_to_bytes(dict(read_fields(proc / "meminfo")).get("MemAvailable"))
    if available is not None:
        found.append(Limit("MemAvailable of /proc/meminfo", available))
    groups = MemoryGroups.of("self", proc=proc)
    for folder in groups.folders:
        most = groups.limit(folder)
        if most is not None:
            used = max(0, (groups.usage(folder) or 0) - groups.inactive_cache(folder))
            found.append(Limit(str(groups.limit_file(folder)), max(0, most - used)))
    return found


def _is_memory(kinds: str, is_version_1: bool) -> bool:
    return "memory" in kinds.split(",") if is_version_1 else not kinds


def _climb(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Folders from a group to the top of the mounted tree; a container sees a part of the tree, or only its own."""
    inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    names = [name for name in inside.split("/") if name not in ("", "..")]
    if not (mount / "/".join(names)).is_dir():
        names = []
    for depth in range(len(names), -1, -1):
        yield mount.joinpath(*names[:depth])


def _mounts(proc: Path) -> Iterator[tuple[bool, str, Path]]:
    """(version 1, part of the tree, where) of each mounted tree that can count memory."""
    for line in read_text(proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            is_version_1 = kind[0] == "cgroup"
            if not is_version_1 or "memory" in kind[2].split(","):
                yield is_version_1, fields[3], Path(fields[4].replace("\\040", " "))


def _lines(path: Path) -> list[tuple[str, str]]:
    """(kinds, path) of each line of /proc/PID/cgroup."""
    found = (line.split(":", 2) for line in read_text(path).splitlines())
    return [(fields[1], fields[2]) for fields in found if len(fields) == 3]


def read_fields(path: Path) -> Iterator[tuple[str, str]]:
    """(name, value) of each line "name: value"."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """(name, value) of each line "name value"."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        yield name, value.strip()


def kib_to_bytes(text: str | None) -> int | None:
    """Bytes of a text such as "12 kB"; None without a number."""
    size = to_number(text.split()[0]) if text else None
    return None if size is None else size << 10


def to_number(text: str | None) -> int | None:
    """A text of digits as a number; None for other texts."""
    return int(text) if text is not None and text.strip().isdigit() else None


def read_text(path: Path) -> str:
    """The text of a file without white space around it; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
