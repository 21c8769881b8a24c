"""Homes of checkpoints: groups of ranks that share a folder, and their leaders.

If all nodes share a folder of checkpoints, so do all ranks of a node. With node-local storage every node has its own
folder, and ranks of one node that pass different folders have a home each.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from pathlib import Path


def own_node() -> tuple[str, str]:
    """Identity of this node; the host name alone may be that of containers on several nodes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.is_file() else ""


def leaders_of(homes: Sequence[Hashable]) -> tuple[int, ...]:
    """For each rank the first rank with an equal home."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(home, rank) for rank, home in enumerate(homes))
