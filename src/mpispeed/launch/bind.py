"""Binds a rank to its part of the listed cores and to the chosen accelerators, before it joins MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from mpispeed.base.errors import ConfigError
from mpispeed.launch.options import Binding, parse_core_list

CORES = "MPISPEED_BIND_CORES"
DEVICES = "MPISPEED_BIND_DEVICES"  # by node of SLURM: n1=0,1;n2=3

_PLACES = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
"""Variables of this rank's number on its node and of the number of ranks there, by launcher; SLURM's come last."""


def local_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """(number on its node, ranks there) of this process by its launcher; (0, 1) without one."""
    return told_local_place(environ) or (0, 1)


def told_local_place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """(number on its node, ranks there) of this process; None if no launcher tells."""
    for rank, size in _PLACES:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return int(environ[rank]), int(environ[size])
    if not environ.get("SLURM_LOCALID", "").isdigit():
        return None
    tasks = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in tasks for _ in range(int(times or 1))]
    node = int(environ.get("SLURM_NODEID") or 0)
    return int(environ["SLURM_LOCALID"]), counts[node] if node < len(counts) else 1


def bind_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bind this process to its part of the listed cores, and show it the chosen accelerators, where there is a list.

    Raises:
        ConfigError: this node does not have the cores, or too few are listed.
    """
    lists = dict(part.partition("=")[::2] for part in environ.get(DEVICES, "").split(";"))
    devices = lists.get(environ.get("SLURMD_NODENAME", ""))
    if devices:
        environ["CUDA_VISIBLE_DEVICES"] = devices
    text = environ.get(CORES)
    if not text or not hasattr(os, "sched_setaffinity"):
        return
    rank, size = local_place(environ)
    part = Binding("mpi", None, parse_core_list(text)).parts(size)[rank]
    try:
        os.sched_setaffinity(0, part)
    except OSError as error:
        msg = (
            f"rank {rank} of this node cannot be bound to the cores {', '.join(map(str, part))} of --bind_core_list "
            f"({error}); it may run on {', '.join(map(str, sorted(os.sched_getaffinity(0))))}"
        )
        raise ConfigError(msg) from error
