"""Options of `mpispeed run` turned into hosts, variables and the command of a rank."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.units import parse_duration
from mpispeed.cli import deepspeed_options
from mpispeed.drill.faults import parse_faults
from mpispeed.launch import hosts as hosts_of
from mpispeed.launch.hosts import Choice, Host
from mpispeed.launch.options import Wishes, parse_binding
from mpispeed.launch.program import runner, without_folder
from mpispeed.launch.srun import is_inside_allocation
from mpispeed.launch.torch_env import TORCH_ENV
from mpispeed.tuning.words import config_of

# DeepSpeed's names of launchers; all of its ways to reach other hosts are mpirun's here.
_LAUNCHERS = {
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "impi": "mpirun",
    "mvapich": "mpirun",
    "pdsh": "mpirun",
    "slurm": "srun",
}


def wrapper_flags(version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Python's flags for the command `mpispeed`, likewise."""
    return without_folder("mpispeed", "mpispeed.cli.main", version)


def launcher_of(_ctx: click.Context, _parameter: click.Parameter, text: str) -> str:
    """Launcher of a name; DeepSpeed's names count."""
    name = _LAUNCHERS.get(text.lower(), text.lower())
    if name not in ("auto", "mpirun", "srun"):
        msg = f"{text!r} is none of auto, mpirun, srun, nor of DeepSpeed's {', '.join(_LAUNCHERS)}"
        raise click.BadParameter(msg)
    return name


_PLACES = (
    click.option("-n", "--ranks", type=int, help="Number of ranks; by default all slots of the hosts, the tasks of the "
                 "SLURM job, else 1."),
    click.option("-H", "--hostfile", type=click.Path(path_type=Path), help="File with a line NAME slots=N per host."),
    click.option("-i", "--include", default="", help="Use only these: HOST[:SLOT,...][@HOST...]."),
    click.option("-e", "--exclude", default="", help="Use all but these, written likewise."),
    click.option("--num-nodes", "--num_nodes", type=int, help="Use the first N hosts."),
    click.option("--num-gpus", "--num_gpus", "--num_accelerators", "num_gpus", type=int,
                 help="Use slots 0 to N-1 of every host, whatever the host file says."),
)  # fmt: skip
_LAUNCHER = (
    click.option("--launcher", default="auto", show_default=True, callback=launcher_of,
                 help="auto, mpirun or srun; auto takes srun inside a SLURM allocation."),
    click.option("--launcher-args", "--launcher_args", default="", help="More words for the launcher, as in a shell."),
    click.option("--mpi", type=click.Choice(["auto", "site"]), default="auto", show_default=True,
                 help="auto: an mpirun beside Python, else the one on PATH; site: only PATH."),
    click.option("--ssh", default="", help="Command that starts programs on other hosts, in place of ssh."),
    click.option("--bind", default="mpi", show_default=True,
                 help="cores: each rank gets its share of the cores, cores:N: N cores; none; mpi: as the MPI does."),
    click.option("--bind-cores-to-rank", "--bind_cores_to_rank", is_flag=True, help="The same as --bind cores."),
    click.option("--bind-core-list", "--bind_core_list", help="Bind ranks to these cores only, as in 0,2-4,6."),
    click.option("--master-addr", "--master_addr", help="Set MASTER_ADDR for code that reads it; MPI does not."),
    click.option("--master-port", "--master_port", type=int, help="Set MASTER_PORT likewise."),
)  # fmt: skip
_RANKS = (
    click.option("--run-dir", "--enable_each_rank_log", type=click.Path(path_type=Path),
                 help="Folder for logs of ranks and reports of this run."),
    click.option("--walltime", help="How long the job may run, in seconds or as D-HH:MM:SS."),
    click.option("--hang-timeout", "--hang_timeout", type=click.FloatRange(min=0, min_open=True),
                 help="Seconds after which a rank that keeps others waiting ends the job."),
    click.option("--inject", help="A fault to drill, as in kill:rank=1@step=5."),
    click.option("--torch-env", "--torch_env", is_flag=True,
                 help="Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank."),
    click.option("--as-deepspeed", "--as_deepspeed", is_flag=True,
                 help="`import deepspeed` finds the names of mpispeed, in SCRIPT and in libraries; with --torch-env."),
)  # fmt: skip
_STAGING = (
    click.option("--stage-env", is_flag=True,
                 help="Unpack the environment on each node, and start the ranks from there: one file is read per job."),
    click.option("--stage-dir", metavar="FOLDER", envvar="MPISPEED_STAGE_DIR",
                 help="With --stage-env: folder of each node to unpack to; by default the first of TMPDIR, /tmp and "
                 "/dev/shm with room."),
)  # fmt: skip
_ELASTIC = (
    click.option("--elastic", "--elastic_training", is_flag=True,
                 help="Start a job that died again, on the hosts that answer."),
    click.option("--min-nodes", "--min_elastic_nodes", type=int, default=1, show_default=True,
                 help="With --elastic: wait for as many hosts."),
    click.option("--max-nodes", "--max_elastic_nodes", type=int, help="With --elastic: use at most as many hosts."),
    click.option("--max-restarts", type=int, default=3, show_default=True, help="With --elastic."),
    click.option("--restart-pause", type=float, default=5.0, show_default=True,
                 help="With --elastic: seconds before the first restart; doubled before each further one."),
    click.option("--host-check", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
                 help="With --elastic: seconds between two questions to every host whether it is there."),
)  # fmt: skip


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options, in the order in which help shows them."""
    for option in reversed((*_PLACES, *_LAUNCHER, *deepspeed_options.OPTIONS, *_RANKS, *_STAGING, *_ELASTIC)):
        command = option(command)
    return command


def chosen_hosts(chosen: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts and slots of the options; empty for all there are. A host file that is not there is a notice.

    Raises:
        ConfigError: they do not fit together, or not the host file.
    """
    choice = Choice(chosen["include"], chosen["exclude"], chosen["num_nodes"], chosen["num_gpus"])
    path = deepspeed_options.existing(chosen["hostfile"])
    if path is not None:
        return hosts_of.fill(choice.of(hosts_of.read_hostfile(path), str(path)), chosen["ranks"], str(path))
    # An mpirun is told the nodes: MPIs differ in their use of a batch system's numbers.
    if is_inside_allocation(environ) and (choice or chosen["elastic"] or chosen["launcher"] == "mpirun"):
        where = f"SLURM job {environ['SLURM_JOB_ID']}"
        return hosts_of.fill(choice.of(hosts_of.slurm_slots(environ), where), chosen["ranks"], where)
    if chosen["elastic"] and not choice:
        return (Host(hosts_of.HERE, tuple(range(chosen["ranks"] or 1))),)
    return (
        hosts_of.fill(hosts_of.choose_here(choice, chosen["ranks"]), chosen["ranks"], "the options") if choice else ()
    )


def variables_of(chosen: Mapping[str, Any], environ: Mapping[str, str], hosts: Sequence[Host]) -> dict[str, str]:
    """Variables of the options for all ranks.

    Raises:
        ConfigError: the folder of the run is a file, or a text is neither a fault nor a duration.
    """
    _check_texts(chosen["inject"], chosen["walltime"])
    found = {
        "MPISPEED_INJECT": chosen["inject"],
        "MPISPEED_WALLTIME": chosen["walltime"],
        "MPISPEED_HANG_TIMEOUT": None if chosen["hang_timeout"] is None else f"{chosen['hang_timeout']:g}",
        "MASTER_ADDR": chosen["master_addr"],
        "MASTER_PORT": None if chosen["master_port"] is None else str(chosen["master_port"]),
    }
    folder: Path | None = chosen["run_dir"]
    if folder is not None:
        folder = folder.absolute()
        if folder.exists() and not folder.is_dir():
            msg = f"--run-dir {folder} is a file; name a folder"
            raise ConfigError(msg)
        found["MPISPEED_RUN_DIR"] = str(folder)
    if chosen["hostfile"] is not None and hosts:
        here = str(Path.cwd())
        if chosen["no_python"]:
            found["PYTHONPATH"] = os.pathsep.join(word for word in (here, environ.get("PYTHONPATH", "")) if word)
        else:
            found["MPISPEED_IMPORT_FOLDER"] = here
    if chosen["as_deepspeed"]:
        found["PYTHONPATH"] = _with_deepspeed(found.get("PYTHONPATH") or environ.get("PYTHONPATH", ""))
    return {name: value for name, value in found.items() if value is not None}


def _with_deepspeed(python_path: str) -> str:
    """PYTHONPATH of ranks whose `import deepspeed` finds the names of mpispeed.

    Raises:
        ConfigError: DeepSpeed itself is installed.
    """
    from mpispeed.compat.as_deepspeed import find_real, with_folder

    real = find_real()
    if real:
        msg = f"--as-deepspeed: DeepSpeed itself is installed ({real}); uninstall it, or leave the option out"
        raise ConfigError(msg)
    return with_folder(python_path)


def _check_texts(inject: str | None, walltime: str | None) -> None:
    """Refuse texts here that every rank would refuse after its start.

    Raises:
        ConfigError: naming the option.
    """
    if inject is not None:
        parse_faults(inject, "--inject")
    try:
        parse_duration(walltime or 0)
    except ValueError as error:
        msg = f"--walltime: {error}"
        raise ConfigError(msg) from None


def wishes_of(chosen: Mapping[str, Any], environ: Mapping[str, str]) -> Wishes:
    """The wishes of the options for a start.

    Raises:
        ConfigError: they do not fit together.
    """
    if chosen["bind_cores_to_rank"] and chosen["bind"] not in ("mpi", "cores"):
        msg = f"--bind_cores_to_rank and --bind {chosen['bind']} exclude each other; give one of them"
        raise ConfigError(msg)
    hosts = chosen_hosts(chosen, environ)
    deepspeed_options.check(chosen, environ, hosts)
    return Wishes(
        hosts=hosts,
        launcher=chosen["launcher"],
        agent=deepspeed_options.agent_of(chosen, shlex.split(chosen["ssh"])),
        binding=parse_binding("cores" if chosen["bind_cores_to_rank"] else chosen["bind"], chosen["bind_core_list"]),
        extra=tuple(shlex.split(chosen["launcher_args"])),
        variables=variables_of(chosen, environ, hosts),
        has_runner=not chosen["no_python"],
        has_torch_env=chosen["torch_env"],
    )


def program_of(chosen: Mapping[str, Any], script: str, arguments: Sequence[str]) -> list[str]:
    """The command of each rank.

    Raises:
        ConfigError: the options exclude each other.
        UsageError: there is no such script.
    """
    if chosen["module"] and chosen["no_python"]:
        msg = "--module and --no_python exclude each other: a module needs Python; give one of them"
        raise ConfigError(msg)
    if chosen["no_python"]:
        wrapper = [sys.executable, *wrapper_flags(), "env", "--"] if chosen["torch_env"] else []
        return [*wrapper, script, *arguments]
    if not chosen["module"] and not Path(script).is_file():
        msg = f"there is no script {script} (looked from {Path.cwd()}); give its path, or -m for a module"
        raise UsageError(msg)
    words = [*(["-m"] if chosen["module"] else []), script, *arguments]
    # On the command line: not every MPI passes a variable on to other hosts.
    flags = [TORCH_ENV] if chosen["torch_env"] else []
    return [sys.executable, *runner(), "-m", "mpispeed.launch.rank", *flags, *words]


def elastic_counts_of(arguments: Sequence[str]) -> list[int] | None:
    """Numbers of ranks that the `elasticity` section of the script's config allows; None if it has none.

    The config follows --deepspeed_config, --config or --deepspeed in the script's arguments.

    Raises:
        ConfigError: the section is wrong.
    """
    path = config_of(arguments)
    if path is None:
        return None
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"--elastic reads the section elasticity of {path}, but that cannot be read: {error}"
        raise ConfigError(msg) from error
    section = settings.get("elasticity") if isinstance(settings, dict) else None
    if not isinstance(section, dict) or not section.get("enabled"):
        return None
    from mpispeed.config.elastic_batch import elastic_counts  # imports pydantic: only when it is needed

    return list(elastic_counts(section))


def save_dir_of(arguments: Sequence[str]) -> str:
    """`walltime.save_dir` of the script's config; "" if it has none."""
    path = config_of(arguments)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text())["walltime"]["save_dir"] or "") if path else ""
    return ""
