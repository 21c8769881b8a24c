"""Writes the srun command line."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from mpispeed.base.errors import UsageError
from mpispeed.launch.hosts import Host
from mpispeed.launch.mpirun import Family
from mpispeed.launch.options import Wishes

# The wrong plugin does not fail: every process becomes a world of one.
_PLUGIN = {Family.MPICH: "pmi2", Family.INTEL: "pmi2", Family.OPEN_MPI: "pmix"}

# SLURM numbers the batch script and the shell of salloc as steps too; their processes are no ranks.
_SHELL_STEPS = {"4294967290", "4294967291"}


def is_inside_allocation(environ: Mapping[str, str]) -> bool:
    """True in a batch script or an salloc shell; False inside a step, whose processes are ranks already."""
    return "SLURM_JOB_ID" in environ and not is_step(environ) and is_installed(environ)


def is_step(environ: Mapping[str, str]) -> bool:
    """True inside a step that srun has started; False in a batch script or an salloc shell."""
    return "SLURM_STEP_ID" in environ and environ["SLURM_STEP_ID"] not in _SHELL_STEPS


def is_installed(environ: Mapping[str, str]) -> bool:
    """True if there is an srun on PATH."""
    return shutil.which("srun", path=environ.get("PATH")) is not None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """The positive number in a variable; None if the variable is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        msg = f"{name} is {text!r} in the environment of this SLURM job, not a positive whole number; set or unset it"
        raise UsageError(msg)
    return int(text)


def allocation_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """(tasks, nodes) of the allocation.

    Raises:
        UsageError: a variable of SLURM is not a number.
    """
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or 1
    return _number(environ, "SLURM_NTASKS") or nodes, nodes


def cores_per_rank(ranks_per_node: int, environ: Mapping[str, str]) -> int | None:
    """Cores that a rank gets: as the job asks for, else its share of the node; None if SLURM does not say.

    Raises:
        UsageError: a variable of SLURM is not a number.
    """
    asked = _number(environ, "SLURM_CPUS_PER_TASK")
    if asked is not None:
        return asked
    on_node = _number(environ, "SLURM_CPUS_ON_NODE")
    return None if on_node is None else max(1, on_node // ranks_per_node)


def srun_argv(
    ranks: int, program: Sequence[str], family: Family | None, environ: Mapping[str, str], wishes: Wishes | None = None
) -> list[str]:
    """The command line that starts `program` on `ranks` tasks, on the hosts of the wishes or on the allocation.

    `family` is the MPI that the ranks load; with None, or a SLURM_MPI_TYPE from the user, the site's plugin is used.

    Raises:
        UsageError: the ranks do not spread evenly over the nodes, or a variable of SLURM is not a number.
    """
    wishes = wishes or Wishes()
    # A site, or sbatch --export=NONE, can tell srun to pass nothing on.
    is_own = any(word.split("=")[0] == "--export" for word in wishes.extra)
    flags = ["--kill-on-bad-exit=1", *([] if is_own else ["--export=ALL"])]
    plugin = _PLUGIN.get(family) if family is not None else None
    if plugin and "SLURM_MPI_TYPE" not in environ:
        flags.append(f"--mpi={plugin}")
    if wishes.hosts:
        nodes = len(wishes.hosts)
        flags += _places(wishes.hosts)
    else:
        nodes = allocation_size(environ)[1]
        flags += _spread(ranks, nodes, environ) if "SLURM_JOB_ID" in environ else []
    cores = cores_per_rank(-(-ranks // nodes), environ)
    if cores is not None:
        # Since 22.05 srun does not inherit it; without it each rank is bound to a single core.
        flags.append(f"--cpus-per-task={cores if wishes.binding.share is None else wishes.binding.share}")
    if wishes.binding.kind == "cores" and not wishes.binding.cores:
        flags.append("--cpu-bind=cores")
    elif wishes.binding.kind == "none" or wishes.binding.cores:
        flags.append("--cpu-bind=none")
    return ["srun", *flags, *wishes.extra, f"--ntasks={ranks}", *program]


def _spread(ranks: int, nodes: int, environ: Mapping[str, str]) -> list[str]:
    """Flags that spread ranks evenly over an allocation.

    Raises:
        UsageError: that is not possible.
    """
    if ranks % nodes and ranks > nodes:
        job = environ.get("SLURM_JOB_ID", "?")
        msg = (
            f"{ranks} ranks do not spread evenly over the {nodes} nodes of job {job}; ask for a multiple of {nodes}, "
            "or name the hosts and their slots with --hostfile"
        )
        raise UsageError(msg)
    # Without it SLURM may fill the first node and leave one rank for the second.
    return [f"--nodes={nodes}", f"--ntasks-per-node={ranks // nodes}"] if ranks >= nodes else []


def _places(hosts: Sequence[Host]) -> list[str]:
    """Flags that put ranks on these hosts."""
    counts = {len(host.slots) for host in hosts}
    if len(counts) == 1:
        return [
            f"--nodelist={','.join(host.name for host in hosts)}", f"--nodes={len(hosts)}",
            f"--ntasks-per-node={counts.pop()}",
        ]  # fmt: skip
    tasks = ",".join(name for host in hosts for name in [host.name] * len(host.slots))
    return [f"--nodelist={tasks}", f"--nodes={len(hosts)}", "--distribution=arbitrary"]
