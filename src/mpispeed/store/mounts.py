"""File systems of folders, from the mount table of Linux."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are host memory."""

NETWORK_TYPES = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs",
    "fuse.sshfs", "gfs2", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3",
    "wekafs",
})  # fmt: skip
"""File systems that several nodes may have mounted."""

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One row of the mount table.

    Attributes:
        point: the mount point.
        type: the file system, such as "ext4".
        source: a device or "server:/export".
    """

    point: str
    type: str
    source: str

    @property
    def is_memory(self) -> bool:
        """True if files of the mount are in host memory."""
        return self.type in MEMORY_TYPES

    @property
    def is_network(self) -> bool:
        """True if other nodes may see the same files."""
        return self.type in NETWORK_TYPES


UNKNOWN = Mount("/", "unknown", "")


def mount_of(folder: Path) -> Mount:
    """The mount of `folder`; `UNKNOWN` where there is no mount table.

    Format: proc_pid_mountinfo(5), Linux manual pages.
    """
    try:
        # Names in the table are bytes of any encoding.
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
        path = folder.resolve()
    except (OSError, RuntimeError, ValueError):  # no table; a loop of links; no path at all
        return UNKNOWN
    found = UNKNOWN
    for mount in map(_parse, lines):
        # Of several mounts on one point the last hides the others.
        if mount is not None and len(mount.point) >= len(found.point) and path.is_relative_to(mount.point):
            found = mount
    return found


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there; quotas are not counted.

    Raises:
        OSError: the file system does not answer.
    """
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _parse(line: str) -> Mount | None:
    fields, _, rest = line.partition(" - ")
    words, described = fields.split(" "), rest.split(" ")
    if len(words) < 5 or len(described) < 2:
        return None
    return Mount(_plain(words[4]), described[0], _plain(described[1]))


def _plain(text: str) -> str:
    """Undo the octal escapes of blanks and backslashes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
