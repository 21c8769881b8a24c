"""`mpispeed run --elastic`: the supervisor, built from the options."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mpispeed.base.units import parse_duration
from mpispeed.cli.run_options import elastic_counts_of, save_dir_of
from mpispeed.launch import plan_launch
from mpispeed.launch.command import Launch, takes_srun
from mpispeed.launch.hosts import Host
from mpispeed.launch.node_states import ASK_SECONDS, RECHECK_SECONDS, NodeStates
from mpispeed.launch.options import Wishes
from mpispeed.launch.run_markers import Marks
from mpispeed.launch.supervise import Limits, Prober, Supervisor
from mpispeed.staging.spread import STAGED

_RUN_DIR, _WALLTIME = "MPISPEED_RUN_DIR", "MPISPEED_WALLTIME"
_ASK_SLURM = ("srun", "--overlap", "--immediate=10", "--nodes=1", "--ntasks=1", "--mpi=none", "--nodelist")


def supervisor_of(
    chosen: Mapping[str, Any], wishes: Wishes, program: Sequence[str], arguments: Sequence[str]
) -> Supervisor:
    """Build the supervisor of the job.

    Raises:
        ConfigError: the limits, or the elasticity section of the script's config, are wrong.
    """
    is_slurm = takes_srun(wishes.launcher, os.environ)
    limits = Limits(
        least_nodes=chosen["min_nodes"],
        most_nodes=chosen["max_nodes"],
        most_restarts=chosen["max_restarts"],
        pause_seconds=chosen["restart_pause"],
        beat_seconds=max(chosen["host_check"], ASK_SECONDS) if is_slurm else chosen["host_check"],
        **({"recheck_seconds": RECHECK_SECONDS} if is_slurm else {}),
    )
    limits.check()
    began = time.monotonic()

    def plan(hosts: tuple[Host, ...], restarts: int) -> Launch:
        count = {"MPISPEED_ELASTIC": "1", "MPISPEED_RESTART_COUNT": str(restarts)}
        left = _walltime_left(wishes.variables, time.monotonic() - began) if restarts else {}
        placed = replace(wishes, hosts=hosts, variables={**wishes.variables, **count, **left})
        return plan_launch(program, mpi=chosen["mpi"], is_debug=chosen["debug"], wishes=placed)

    def say(text: str) -> None:
        click.echo(f"mpispeed: {text}", err=True)

    folder = wishes.variables.get(_RUN_DIR) or os.environ.get(_RUN_DIR) or save_dir_of(arguments)
    return Supervisor(
        hosts=wishes.hosts,
        plan=plan,
        prober=_prober(wishes, limits, _question(wishes, is_slurm=is_slurm), is_slurm=is_slurm),
        limits=limits,
        say=say,
        counts=elastic_counts_of(arguments),
        watcher=NodeStates(say, limits.probe_seconds) if is_slurm else _prober(wishes, limits, is_slurm=False),
        marks=Marks(Path(folder)) if folder else None,
    )


def _walltime_left(variables: Mapping[str, str], passed_seconds: float) -> dict[str, str]:
    """The variable for a later start: its processes count from their own beginning. Empty if no time was given."""
    text = variables.get(_WALLTIME) or os.environ.get(_WALLTIME, "")
    try:
        return {_WALLTIME: str(int(max(0.0, parse_duration(text) - passed_seconds)))}
    except ValueError:
        return {}  # the ranks refuse the variable


def _question(wishes: Wishes, *, is_slurm: bool) -> tuple[str, ...]:
    """What a host has to do before ranks are started there: with a staged environment, to show that it has its copy."""
    folder = wishes.variables.get(STAGED)
    if folder is None:
        return ("true",)
    lock = f"{folder}/lock"
    return ("ls", lock if is_slurm else shlex.quote(lock))  # ssh has a shell read it


def _prober(wishes: Wishes, limits: Limits, question: tuple[str, ...] = ("true",), *, is_slurm: bool) -> Prober:
    if is_slurm:
        return Prober(_ASK_SLURM, question, limit_seconds=limits.probe_seconds, asks_this_host=True)
    if wishes.agent:
        return Prober(wishes.agent, question, limit_seconds=limits.probe_seconds)
    return Prober(question=question, limit_seconds=limits.probe_seconds)
