"""Homes of checkpoints: which ranks see one folder, and which of them speaks for the others.

Where all nodes share a folder of checkpoints, all ranks of a node have that one. With node-local storage every node has
a folder of its own, and ranks of one node that pass different folders have a home each.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from pathlib import Path


def own_node() -> tuple[str, str]:
    """What tells this node from others; containers on several nodes may be of one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.is_file() else ""


def leaders_of(homes: Sequence[Hashable]) -> tuple[int, ...]:
    """For each rank the first rank with an equal home."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(home, rank) for rank, home in enumerate(homes))
