"""Environment variables that ranks need, and the facts about this node that decide them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def usable_cores() -> int:
    """Cores this process may run on: an affinity mask or a cgroup can leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(
    environ: Mapping[str, str], *, ranks_per_node: int, cores: int, is_debug: bool = False
) -> dict[str, str]:
    """What to add to `environ` for the ranks; a variable the user has set is left alone.

    Units: `ranks_per_node` ranks share `cores` cores of one node.
    """
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks_per_node)),
        "PYTHONUNBUFFERED": "1",
    }
    if ranks_per_node > cores:
        # A rank that waits would spin through its time slice while the rank it waits for has no core:
        # milliseconds for each small collective, instead of microseconds.
        wanted["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        wanted["I_MPI_THREAD_YIELD"] = "3"
    added = {name: value for name, value in wanted.items() if name not in environ}
    if is_debug:
        added["MPISPEED_DEBUG"] = "1"
    return added
