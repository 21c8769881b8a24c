"""Places of a node that an environment can be unpacked to: their room, inodes and memory, and who can write there."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from mpispeed.base.ways import walk_to

PLACES = ("/tmp", "/dev/shm")

_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "panfs", "ceph", "wekafs", "pvfs2", "afs", "9p")
_IN_MEMORY = ("tmpfs", "ramfs")


def candidates(place: str = "") -> list[Path]:
    """Places to look at: the one that was asked for, else that of MPISPEED_STAGE_DIR, else TMPDIR, /tmp, /dev/shm."""
    asked = place or os.environ.get("MPISPEED_STAGE_DIR", "")
    names = [asked] if asked else [os.environ.get("TMPDIR", ""), *PLACES]
    return [Path(name).absolute() for name in dict.fromkeys(names) if name]


def unfit(place: Path, need_bytes: int, need_inodes: int, *, is_asked: bool = False) -> str:
    """Why a place cannot take an environment; empty if it can. On a shared file system only if it was asked for."""
    try:
        status, room, is_movable = place.stat(), os.statvfs(place), _others_can_move(place)
    except OSError as error:
        return error.strerror or str(error)
    kind = _file_system(place)
    free_inodes = room.f_favail if room.f_files else need_inodes
    reasons = {
        "it is no folder": not stat.S_ISDIR(status.st_mode),
        "its name has a tab or a line break": bool(re.search(r"[\t\r\n]", str(place))),
        "another user can move what is in it": is_movable,
        "it cannot be written": not os.access(place, os.W_OK | os.X_OK),
        "it is mounted with noexec": bool(room.f_flag & os.ST_NOEXEC),
        f"it is on a shared file system ({kind})": not is_asked and (kind in _SHARED or kind.startswith("fuse")),
        f"{room.f_bavail * room.f_frsize >> 20} MiB are free of {need_bytes >> 20}": (
            room.f_bavail * room.f_frsize < need_bytes
        ),
        f"{free_inodes} inodes are free of {need_inodes}": free_inodes < need_inodes,
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    if found or kind not in _IN_MEMORY:
        return found
    free = free_memory()
    return f"the job may use {free >> 20} MiB more of memory, not {need_bytes >> 20}" if free < need_bytes else ""


def _others_can_move(place: Path) -> bool:
    """True if somebody besides us and root could replace what is in a place, or a folder or link on the way to it."""
    return any(
        status.st_uid not in (0, os.geteuid())
        or (stat.S_ISDIR(status.st_mode) and bool(status.st_mode & 0o022) and not status.st_mode & stat.S_ISVTX)
        for _, status in walk_to(place)
    )


def _file_system(place: Path) -> str:
    """Kind of the file system of a place, such as ext4; empty where the system does not tell."""
    where, best, kind = os.path.realpath(place), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[1])
            inside = where == mount or where.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, line.split()[2]
    return kind


def free_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of memory that this process may still take: of the node, and of every control group around it."""
    free = [1 << 60]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and "memory" not in names.split(","):
                continue
            base = root if not names else root / "memory"
            limit, used = ("memory.max", "memory.current") if not names else (
                "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
            inner = base / path.lstrip("/")
            for folder in (inner, *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # "max", or the root, which has no limit
                    free.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
                if folder == base:
                    break
    return max(0, min(free))
