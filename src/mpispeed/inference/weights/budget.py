"""Memory that ranks of a node may take for weights."""

from __future__ import annotations

from pathlib import Path

from mpispeed.base.cgroups import MemoryGroups, kib_to_bytes, read_fields
from mpispeed.base.errors import CheckpointError
from mpispeed.mesh.comm import Comm


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Memory that processes of this rank's control group can still get; None if the kernel tells nothing."""
    free = kib_to_bytes(dict(read_fields(proc / "meminfo")).get("MemAvailable"))
    groups = MemoryGroups.of("self", proc=proc)
    known = [] if free is None else [free]
    for folder in groups.folders:
        limit, usage = groups.limit(folder), groups.usage(folder)
        if limit is not None and usage is not None:
            known.append(max(limit - usage + groups.inactive_cache(folder), 0))
    return min(known) if known else None


def check(node: Comm, needed: int, budget: int | None, source: str) -> None:
    """Check that all ranks of a node together get what they need, before any of them allocates.

    Args:
        node: the ranks of the node.
        needed: bytes that this rank will make.
        budget: bytes that each rank may make; None for what the node has.
        source: for the message.

    Collective over: `node`.

    Raises:
        CheckpointError: there is less.
    """
    rows = node.gather_objects((needed, available_bytes() if budget is None else budget))
    total, known = sum(row[0] for row in rows), [row[1] for row in rows if row[1] is not None]
    if budget is not None:
        over = next((rank for rank, row in enumerate(rows) if row[0] > budget), None)
        if over is not None:
            msg = f"the weights of {source} take {_shown(rows[over][0])} on a rank and its budget is {_shown(budget)}; "
            raise _told(msg + "use more ranks for tensor parallelism, or a shorter dtype")
    elif known and total > min(known):
        msg = f"the weights of {source} take {_shown(total)} on the {node.size} ranks of a node, which has "
        msg += f"{_shown(min(known))} left; use more nodes, more ranks for tensor parallelism, or a shorter dtype"
        raise _told(msg)


def _told(message: str) -> CheckpointError:
    error = CheckpointError(message)
    error.is_collective = True
    return error


def _shown(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"
