"""`deepspeed.comm` for Hugging Face's accelerate, which asks whether ranks are joined before it counts them."""

from __future__ import annotations

import sys
from typing import Any

from mpispeed.compat import comm_groups
from mpispeed.engine import distributed
from mpispeed.mesh.world import World


def is_initialized() -> bool:
    """True once MPI has been started by this library."""
    _tell()
    return comm_groups.is_initialized()


def init_distributed(*args: Any, **kwargs: Any) -> World:
    """As `mpispeed.init_distributed`. Collective over: all ranks of the job, at the first call."""
    _tell()
    return distributed.init_distributed(*args, **kwargs)


def _tell() -> None:
    """Name the back end to the state that accelerate is about to fill.

    It has no name for one where there is no accelerator, and then takes each rank for a job of its own: all ranks
    would train on all data.
    """
    state = sys.modules.get("accelerate.state")
    shared = None if state is None else state.PartialState._shared_state
    if shared and shared.get("backend", "") is None and "num_processes" not in shared:
        shared["backend"] = "mpi4py"
