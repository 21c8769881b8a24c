"""Variables of torch.distributed for a rank, made from those of its launcher; MPI is not joined for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpispeed.base.errors import UsageError
from mpispeed.base.launched import RANKS, SIZES, launched_rank, launched_size
from mpispeed.base.ports import JOB_VARIABLES, free_port, port_of
from mpispeed.launch.bind import told_local_place
from mpispeed.launch.hosts import HERE, Host, first_slurm_name
from mpispeed.launch.srun import is_step

HOST_RANKS = "MPISPEED_HOST_RANKS"  # numbers of ranks by host, in the order of ranks: 2,2,1
TORCH_ENV = "--torch-env"  # first word for mpispeed.launch.rank
LOOPBACK = "127.0.0.1"
_LOCAL_NAMES = (HERE, LOOPBACK, "::1")


@dataclass(frozen=True, slots=True)
class Start:
    """A rank's start as its variables tell it.

    `size_name` is the variable with the number of ranks, "" without a launcher. `is_of_srun` is False for the ranks of
    an mpirun inside a SLURM job.
    """

    env: Mapping[str, str]
    size_name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    is_of_srun: bool

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks are here."""
        return self.local_size == self.size


def torch_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and NODE_RANK where it is known.

    Without a launcher they are those of a world of one. MASTER_ADDR and MASTER_PORT that are set stay.

    Raises:
        UsageError: the launcher does not tell enough; the message names the variables to set.
    """
    start = _read(env)
    found = {
        "RANK": start.rank,
        "WORLD_SIZE": start.size,
        "LOCAL_RANK": start.local_rank,
        "LOCAL_WORLD_SIZE": start.local_size,
        "MASTER_ADDR": env.get("MASTER_ADDR") or _address(start),
        "MASTER_PORT": env.get("MASTER_PORT") or _port(start),
        **_node_rank(start),
    }
    return {name: str(value) for name, value in found.items()}


def set_torch_variables(env: MutableMapping[str, str] = os.environ) -> str:
    """Add `torch_variables` to an environment; returns a warning for rank 0 to show, or "".

    Raises:
        UsageError: the launcher does not tell enough.
    """
    found = torch_variables(env)
    warning = advice(env, found)
    env.update(found)
    return warning


def advice(env: Mapping[str, str], found: Mapping[str, str]) -> str:
    """A warning about the environment before it gets the variables: "" on all ranks but rank 0, or if it is sound."""
    if launched_rank(env) != 0:
        return ""
    size_name = launched_size(env)[0]
    other = {name: env[name] for name in found if env.get(name, found[name]) not in ("", found[name])}
    if other:
        told = ", ".join(f"{name}={value}" for name, value in other.items())
        right = ", ".join(f"{name}={found[name]}" for name in other)
        who = SIZES.get(size_name, "a world of one, without a launcher")
        return f"{told} in the environment are replaced by {right}, the numbers of {who}; unset them"
    if found["MASTER_ADDR"] in _LOCAL_NAMES and found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]:
        return (
            f"MASTER_ADDR={found['MASTER_ADDR']} in the environment is another host on each node; unset it, or set it "
            "to the host of rank 0"
        )
    tasks = env.get("SLURM_NTASKS", "1")
    if not size_name and not is_step(env) and "SLURM_JOB_ID" in env and tasks.isdigit() and int(tasks) > 1:
        return (
            f"this is the batch shell of SLURM job {env['SLURM_JOB_ID']} with {tasks} tasks, and no rank: a world of "
            "one; to start the ranks: srun mpispeed env -- PROGRAM"
        )
    return ""


def host_variables(hosts: Sequence[Host], *, keeps_order: bool) -> dict[str, str]:
    """Variables for ranks that start on these hosts; none for an empty list, where the launcher chooses.

    With `keeps_order` False the ranks go to the hosts in another order than this.
    """
    if not hosts or not keeps_order:
        return {}
    found = {HOST_RANKS: ",".join(str(len(host.slots)) for host in hosts)}
    if len(hosts) > 1:
        first = hosts[0].name
        found["MASTER_ADDR"] = socket.gethostname() if first in _LOCAL_NAMES else first
        found["MASTER_PORT"] = str(free_port(os.environ))
    return found


def _read(env: Mapping[str, str]) -> Start:
    size_name, size = launched_size(env)
    if not size_name:
        return Start(env, "", 0, 1, 0, 1, is_of_srun=False)
    if size > 1 and not env.get(RANKS[size_name], "").isdigit():
        msg = f"{size_name} is {size}, but {RANKS[size_name]} is not set: start with srun, mpirun or mpispeed run"
        raise UsageError(msg)
    rank = launched_rank(env)
    place = None if size_name == "WORLD_SIZE" else told_local_place(env)
    own = env.get("LOCAL_RANK", ""), env.get("LOCAL_WORLD_SIZE", "")
    if place is None and all(map(str.isdigit, own)):
        place = int(own[0]), int(own[1])
    if place is None and size > 1:
        msg = (
            f"{SIZES[size_name]} started {size} processes ({size_name}={size}), but does not tell which of them share "
            "a node; set LOCAL_RANK and LOCAL_WORLD_SIZE for each"
        )
        raise UsageError(msg)
    # Under mpirun the variables of a step are those of its helpers.
    is_of_srun = is_step(env) and "MPI_LOCALRANKID" not in env and size_name != "OMPI_COMM_WORLD_SIZE"
    return Start(env, size_name, rank, size, *(place or (0, 1)), is_of_srun=is_of_srun)


def _node_rank(start: Start) -> dict[str, int]:
    """The number of the node, where nodes are numbered: Lightning asks for it."""
    counts = [int(count) for count in start.env.get(HOST_RANKS, "").split(",") if count.isdigit()]
    if sum(counts) == start.size and start.size_name:
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        return {"NODE_RANK": next(place for place, end in enumerate(ends) if start.rank < end)}
    if start.is_on_one_host:
        return {"NODE_RANK": 0}
    number = start.env.get("SLURM_NODEID", "")
    return {"NODE_RANK": int(number)} if start.is_of_srun and number.isdigit() else {}


def _address(start: Start) -> str:
    """The host of rank 0."""
    if start.is_on_one_host:
        return LOOPBACK
    env, name = start.env, ""
    if not start.is_of_srun:
        name = first_slurm_name(env.get("SLURM_JOB_NODELIST", ""))
    elif env.get("SLURM_DISTRIBUTION") != "arbitrary":  # where rank 0 may be on any host
        name = first_slurm_name(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    if name:
        return name
    msg = (
        f"{start.size_name} is {start.size}, and {start.local_size} of these ranks are here: there are several hosts, "
        "and no list tells which of them has rank 0; set MASTER_ADDR to it for all ranks, or start with "
        "mpispeed run --torch-env --hostfile FILE"
    )
    raise UsageError(msg)


def _port(start: Start) -> int:
    """A port on which all ranks agree, and which two jobs on a host hardly share."""
    env = start.env
    if start.size == 1:
        return free_port(env)
    job = [env.get(name, "") for name in JOB_VARIABLES]
    own = ""
    if start.size_name == "OMPI_COMM_WORLD_SIZE":
        own = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        job = []  # its helpers on other hosts have variables of a step, mpirun has none
    elif env.get("PALS_APID"):
        own = env["PALS_APID"]
    elif start.is_on_one_host and not start.is_of_srun:
        own = launcher_pid(RANKS[start.size_name])
    if own or any(job):
        return port_of([*job, own])
    msg = (
        f"{start.size} ranks ({start.size_name}={start.size}) share neither the number of a job nor that of their "
        "launcher; set MASTER_PORT to a free port, the same for all ranks"
    )
    raise UsageError(msg)


def launcher_pid(rank_name: str, processes: Path = Path("/proc"), pid: int | None = None) -> str:
    """Number of the process that started the ranks of this host; "" if it cannot be seen.

    It is the nearest one above this process that is no rank: shells may stand between.
    """
    if not processes.is_dir():
        return str(os.getppid())
    pid = os.getppid() if pid is None else pid
    while pid > 1:
        try:
            variables = (processes / str(pid) / "environ").read_bytes().split(b"\0")
            parent = int((processes / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return ""
        if not any(variable.startswith(f"{rank_name}=".encode()) for variable in variables):
            return str(pid)
        pid = parent
    return ""
