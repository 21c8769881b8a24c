"""Ports for jobs: numbers that follow from a job's name, below the range of ephemeral ports."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Iterable, Mapping

JOB_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID",
)  # fmt: skip
"""Variables that tell the job of a batch system, and the step in it."""

_FIRST, _COUNT, _TRIES = 10000, 20000, 100


def port_of(words: Iterable[str]) -> int:
    """The port of a job that these words tell from others: all processes that know them find the same one."""
    return _FIRST + zlib.crc32(" ".join(words).encode()) % _COUNT


def free_port(env: Mapping[str, str]) -> int:
    """A port that is free on this host; jobs, steps and processes start their search at different ports."""
    first = port_of([*(env.get(name, "") for name in JOB_VARIABLES), str(os.getpid())])
    for tried in range(_TRIES):
        port = _FIRST + (first - _FIRST + tried) % _COUNT
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    return first  # the code that listens there reports the failure better
