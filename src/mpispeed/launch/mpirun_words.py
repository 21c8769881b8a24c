"""Writes the command line of mpirun: MPICH and its relatives, Intel MPI, Open MPI; on this node and on others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import env
from mpispeed.launch.hosts import Host
from mpispeed.launch.mpirun import Family, Mpirun
from mpispeed.launch.options import Wishes

DEVICES = "CUDA_VISIBLE_DEVICES"

# Settings by which users have chosen a binding of Open MPI already.
_BINDING_VARIABLES = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")


def mpirun_argv(
    mpirun: Mpirun,
    ranks: int,
    program: Sequence[str],
    *,
    cores: int,
    is_root: bool,
    wishes: Wishes | None = None,
    exported: Iterable[str] = (),
) -> list[str]:
    """The command line that starts `program` on `ranks` ranks, on this node or on the chosen hosts.

    `cores` are those of this node. Variables named in `exported` are passed on to other hosts.

    Raises:
        ConfigError: the options are not possible with this MPI.
        UsageError: there is no known way to reach other hosts with it.
    """
    wishes = wishes or Wishes()
    write = _WRITERS[mpirun.family]
    per_node = max((len(host.slots) for host in wishes.hosts), default=ranks)
    share = _share(wishes, per_node)
    return [
        str(mpirun.path),
        *write(mpirun, wishes, share=share, per_node=per_node, cores=cores, is_root=is_root),
        *wishes.extra,
        *_blocks(mpirun.family, ranks, program, wishes, exported),
    ]


def launcher_variables(mpirun: Mpirun, wishes: Wishes, environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the launcher that are variables."""
    found = {}
    if mpirun.family is Family.INTEL:
        # Its mpirun is a shell script that looks for its neighbours on PATH.
        found["PATH"] = f"{mpirun.path.parent}{os.pathsep}{environ.get('PATH', '')}"
        if "SLURM_JOB_ID" in environ and not wishes.agent:
            found["I_MPI_HYDRA_BOOTSTRAP"] = environ.get("I_MPI_HYDRA_BOOTSTRAP", "slurm")
        if wishes.hosts:
            found["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "off"  # else a batch system's numbers win
        if wishes.binding.kind == "none" or wishes.binding.cores:
            found["I_MPI_PIN"] = "off"
        elif wishes.binding.kind == "cores":
            share = wishes.binding.share
            found |= {"I_MPI_PIN": "on", "I_MPI_PIN_DOMAIN": "auto" if share is None else f"{share}:compact"}
    if mpirun.family is Family.MPICH and len(wishes.agent) > 1:
        found["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(wishes.agent[1:])
    return found


def common_devices(hosts: Sequence[Host]) -> str | None:
    """The accelerators of all hosts if they are the same everywhere and have to be named.

    An empty answer means that hosts differ, so that each needs its own.
    """
    choices = {host.devices for host in hosts}
    if len(choices) > 1:
        return ""
    return next(iter(choices), None)


def _share(wishes: Wishes, per_node: int) -> int:
    """Cores of a rank with `--bind cores`, or 0 without.

    Raises:
        ConfigError: there are too few.
    """
    binding = wishes.binding
    if binding.kind != "cores" or binding.cores:
        return 0
    if binding.share is not None:
        return binding.share
    cores = env.physical_cores()
    if cores < per_node:
        msg = (
            f"--bind cores: {per_node} ranks of a node cannot have a core each of the {cores} here; start fewer, "
            "give the cores of a rank as in --bind cores:4, or leave --bind out"
        )
        raise ConfigError(msg)
    return cores // per_node


def _mpich(_mpirun: Mpirun, wishes: Wishes, *, share: int, per_node: int, **_: object) -> list[str]:
    flags = []
    if wishes.agent:
        flags += ["-launcher", "ssh", "-launcher-exec", wishes.agent[0]]
    if wishes.hosts:
        flags += ["-genvall", *_hydra_hosts(wishes.hosts, per_node)]
    if share:
        flags += ["-bind-to", f"core:{share}"]
    elif wishes.binding.kind == "none" or wishes.binding.cores:
        flags += ["-bind-to", "none"]
    return flags


def _intel(_mpirun: Mpirun, wishes: Wishes, *, per_node: int, **_: object) -> list[str]:
    flags = []
    if wishes.agent:
        flags += ["-bootstrap", "ssh", "-bootstrap-exec", wishes.agent[0]]
    if len(wishes.agent) > 1:
        flags += ["-bootstrap-exec-args", " ".join(wishes.agent[1:])]
    if wishes.hosts:
        flags.append("-genvall")
        if not _is_cut(Family.INTEL, wishes.hosts):
            flags += _hydra_hosts(wishes.hosts, per_node)
    return flags


def _hydra_hosts(hosts: Sequence[Host], per_node: int) -> list[str]:
    if all(len(host.slots) == per_node for host in hosts):
        return ["-hosts", ",".join(host.name for host in hosts), "-ppn", str(per_node)]
    return ["-hosts", ",".join(f"{host.name}:{len(host.slots)}" for host in hosts)]


def _open_mpi(
    mpirun: Mpirun, wishes: Wishes, *, share: int, per_node: int, cores: int, is_root: bool, **_: object
) -> list[str]:
    flags = ["--allow-run-as-root"] if is_root else []
    if wishes.agent:
        key = ["--prtemca", "plm_ssh_agent"] if mpirun.version >= 5 else ["--mca", "plm_rsh_agent"]
        flags += [*key, " ".join(wishes.agent)]
    if not wishes.hosts and per_node > cores:
        # Its default binds one rank to a core and refuses the first rank too many.
        return [*flags, "--oversubscribe", "--bind-to", "none"]
    if share:
        return [*flags, "--map-by", f"slot:PE={share}", "--bind-to", "core"]
    if wishes.hosts:
        flags += ["--map-by", "slot"]
    has_chosen = any("bind-to" in word for word in wishes.extra) or any(
        name in os.environ for name in _BINDING_VARIABLES
    )
    is_asked = wishes.binding.kind == "none" or bool(wishes.binding.cores)
    # Its default gives each rank one core, however many threads the rank has.
    is_narrow = bool(wishes.hosts) or cores // per_node > 1
    if is_asked or (is_narrow and not has_chosen):
        flags += ["--bind-to", "none"]
    return flags


def _pals(mpirun: Mpirun, wishes: Wishes, *, share: int, per_node: int, **_: object) -> list[str]:
    """Flags of Cray's mpiexec. By default it binds a rank to one core, however many threads the rank has."""
    if wishes.agent or _is_cut(Family.PALS, wishes.hosts) or len({len(host.slots) for host in wishes.hosts}) > 1:
        msg = (
            f"{mpirun.path} is Cray's PALS, which starts as many ranks on each host and needs no ssh; leave out --ssh, "
            "and choose the same number of slots, and the same ones, on all hosts"
        )
        raise UsageError(msg)
    flags = ["--hosts", ",".join(host.name for host in wishes.hosts)] if wishes.hosts else []
    return [*flags, "--ppn", str(per_node), *(["--cpu-bind", "depth", "--depth", str(share)] if share else
                                              ["--cpu-bind", "none"])]  # fmt: skip


def _unknown(mpirun: Mpirun, wishes: Wishes, **_: object) -> list[str]:
    if wishes.hosts or wishes.agent or wishes.binding.kind == "cores":
        msg = (
            f"{mpirun.path} belongs to an MPI whose options are not known here, so it can only start ranks on this "
            "machine; start the ranks with it yourself, or load Open MPI, MPICH or Intel MPI"
        )
        raise UsageError(msg)
    return []


_WRITERS: Mapping[Family, Callable[..., list[str]]] = {
    Family.OPEN_MPI: _open_mpi,
    Family.MPICH: _mpich,
    Family.INTEL: _intel,
    Family.PALS: _pals,
    Family.OTHER: _unknown,
}


def _is_cut(family: Family, hosts: Sequence[Host]) -> bool:
    """True if every host needs a block of its own in the command line."""
    if family is Family.INTEL and len({len(host.slots) for host in hosts}) > 1:
        return True
    return common_devices(hosts) == ""


def _blocks(family: Family, ranks: int, program: Sequence[str], wishes: Wishes, exported: Iterable[str]) -> list[str]:
    """Words after the flags: the number of ranks and the program, by host if need be."""
    is_open = family is Family.OPEN_MPI
    every = list(itertools.chain.from_iterable(("-x", name) for name in exported)) if is_open and wishes.hosts else []
    if not _is_cut(family, wishes.hosts):
        if is_open and wishes.hosts:
            every += ["--host", ",".join(f"{host.name}:{len(host.slots)}" for host in wishes.hosts)]
        return [*every, "-n", str(ranks), *program]
    blocks: list[str] = []
    is_differing = common_devices(wishes.hosts) == ""
    for host in wishes.hosts:
        words = [*every, *_place(family, host), "-n", str(len(host.slots))]
        if is_differing:
            # On every host: Open MPI 5 lets what one block sets hold for those that set nothing.
            devices = ",".join(map(str, host.slots))
            words += ["-x", f"{DEVICES}={devices}"] if is_open else ["-env", DEVICES, devices]
        blocks += [*([":"] if blocks else []), *words, *program]
    return blocks


def _place(family: Family, host: Host) -> list[str]:
    """Words that put a block on its host; MPICH fills its hosts in order."""
    if family is Family.OPEN_MPI:
        return ["--host", f"{host.name}:{len(host.slots)}"]
    return ["-host", host.name] if family is Family.INTEL else []


def device_variables(hosts: Sequence[Host]) -> Mapping[str, str]:
    """The variable that all ranks need to see the chosen accelerators, where it is the same on all hosts."""
    devices = common_devices(hosts)
    return {DEVICES: devices} if devices else {}
