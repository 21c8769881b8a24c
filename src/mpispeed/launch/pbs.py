"""A job of PBS (OpenPBS, PBS Professional, Torque): the hosts and slots of its node file.

PBS starts no ranks itself: an mpirun or mpiexec does, that of the MPI or of Cray's PALS, and is told the hosts.
Source: "MPI" in the PBS Professional user's guide; mpiexec(1) of PALS.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.hosts import Host, Slots

JOB, NODES = "PBS_JOBID", "PBS_NODEFILE"


def is_inside(environ: Mapping[str, str]) -> bool:
    """True in the script or the shell of a PBS job."""
    return bool(environ.get(JOB)) and bool(environ.get(NODES))


def job_slots(environ: Mapping[str, str]) -> tuple[Slots, str]:
    """The hosts of the job with a slot for each of its processes (mpiprocs), and the job's name for messages.

    Raises:
        UsageError: this is no PBS job.
        ConfigError: its node file cannot be read, or names no host.
    """
    if not is_inside(environ):
        msg = f"--launcher pbs: {JOB} and {NODES} are not set; start inside of a PBS job, or use --hostfile"
        raise UsageError(msg)
    where, path = f"PBS job {environ[JOB]}", Path(environ[NODES])
    try:
        names = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{where}: its node file {path} ({NODES}) cannot be read: {error}; give the hosts with --hostfile"
        raise ConfigError(msg) from error
    if not names:
        msg = f"{where}: its node file {path} ({NODES}) names no host; give the hosts with --hostfile"
        raise ConfigError(msg)
    return {name: tuple(range(names.count(name))) for name in dict.fromkeys(names)}, where


def spread(slots: Slots, ranks: int | None, where: str) -> tuple[Host, ...]:
    """The hosts with `ranks` ranks: the job's own slots if there are as many, else equal shares; None for all slots.

    A job that asks for whole nodes, and not for mpiprocs, has one slot on each.

    Raises:
        ConfigError: there are more ranks than slots, and they do not spread evenly over the hosts.
    """
    there = sum(map(len, slots.values()))
    if ranks is None or ranks == there:
        return tuple(Host(name, own) for name, own in slots.items())
    if ranks <= len(slots):
        return tuple(Host(name, (0,)) for name in list(slots)[:ranks])
    if ranks % len(slots):
        msg = (
            f"{ranks} ranks do not spread evenly over the {len(slots)} hosts of {where}, whose node file has {there} "
            f"slots; ask for {there}, for a multiple of {len(slots)}, or name hosts and slots with --hostfile"
        )
        raise ConfigError(msg)
    share = tuple(range(ranks // len(slots)))
    return tuple(Host(name, share) for name in slots)
