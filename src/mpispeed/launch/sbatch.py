"""Fills a batch template from a request, a site's profile, and SLURM's answers about a partition."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from mpispeed.base import assets
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.mpirun import Family, find_mpirun
from mpispeed.launch.program import without_folder
from mpispeed.launch.sites import Site, lines_of, seconds_of
from mpispeed.launch.submit import Partition

TEMPLATES = ("single", "multi", "array", "requeue", "container", "torch", "generate", "tune", "data")
GENERATE, TUNE, DATA = "generate", "tune", "data"
COMMANDS = (GENERATE, TUNE, DATA)
"""In place of a script: batch generation, the search for fast settings, token stores, by the commands of that name."""

SIGNAL_SECONDS = 120
"""Seconds before the time limit at which SLURM sends USR1; the run asks for the limit and is usually done before."""

_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_ARRAY = re.compile(r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """Program and resources of a job; None and "" leave a choice to the site, the partition or SLURM.

    Attributes:
        words: the script and its arguments.
        run_folder: where the run keeps its files; all nodes see it.
        work_folder: where the script starts.
        template: one of TEMPLATES, or a file; "" chooses.
        memory_bytes: of a node.
        image: of a container.
        requeues: an interrupted run is requeued.
        signal_seconds: how long before the limit USR1 is sent; 0 for a script that would die of it.
        is_staged: the ranks start from a copy of the environment on their node; `staged_place` is where, "" for any.
        saves_at_signal: the ranks save at USR1, and get it for a TERM that comes to the batch shell.
        flags: further flags of sbatch, or of qsub.
        run_flags: further options of `mpispeed run`, which starts the ranks of a job of PBS.
    """

    words: Sequence[str]
    run_folder: Path
    work_folder: Path
    template: str = ""
    job_name: str = ""
    nodes: int = 1
    ranks_per_node: int | None = None
    cores_per_rank: int | None = None
    gpus_per_node: int | None = None
    memory_bytes: int | None = None
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    array: str = ""
    image: str = ""
    requeues: bool = False
    signal_seconds: int = SIGNAL_SECONDS
    flags: Sequence[str] = ()
    python: str = sys.executable
    saves_at_signal: bool = False
    is_staged: bool = False
    staged_place: str = ""
    run_flags: Sequence[str] = ()


def choose_template(request: Request) -> str:
    """Return the template that fits the request.

    Raises:
        UsageError: the request does not fit the template that was named.
    """
    if request.template:
        _refuse_misfit(request)
        return request.template
    if request.words[0] in COMMANDS:
        return request.words[0]
    if request.image:
        return "container"
    if request.array:
        return "array"
    if request.requeues:
        return "requeue"
    return "single" if request.nodes == 1 else "multi"


def _refuse_misfit(request: Request) -> None:
    name = request.template
    misfits = {
        "single runs on one node, not on {nodes}; ask for multi": name == "single" and request.nodes > 1,
        "array needs the numbers of its tasks: --array 0-9": name == "array" and not request.array,
        "{name} takes no --array; ask for array": name in TEMPLATES and name != "array" and request.array,
        "container needs the file of an image: --image FILE.sif": name == "container" and not request.image,
        "{name} starts `mpispeed {name}`, not a script: mpispeed sbatch ... {name} ...": (
            name in COMMANDS and request.words[0] != name
        ),
        "{name} starts a script, and {word} is none; leave out --template": (
            name in TEMPLATES and name not in COMMANDS and request.words[0] in COMMANDS
        ),
        "{name} takes no --image; ask for container": name in TEMPLATES and name != "container" and request.image,
    }
    for message, holds in misfits.items():
        if holds:
            raise UsageError("the template " + message.format(nodes=request.nodes, name=name, word=request.words[0]))


def read_template(name: str) -> str:
    """The text of a template by its name or path, with the parts it uses put in.

    Raises:
        UsageError: there is no such template.
    """
    folder = assets.folder("slurm")
    path = folder / "templates" / f"{name}.sbatch" if name in TEMPLATES else Path(name)
    try:
        text = path.read_text()
    except OSError as error:
        msg = f"there is no batch template {name!r} ({error.strerror}); give a file, or one of {', '.join(TEMPLATES)}"
        raise UsageError(msg) from error
    parts = {part.stem: part.read_text().rstrip("\n") for part in (folder / "parts").glob("*.sh")}
    names = "|".join(map(re.escape, parts))
    return re.sub(rf"(?<!\$)\$({names})\b", lambda match: parts[match[1]], text)


def values_of(request: Request, site: Site, partition: Partition) -> dict[str, str]:
    """Values of the names in templates.

    Raises:
        UsageError: something is missing that neither the request nor the site nor SLURM says.
        ConfigError: something that is asked for cannot be.
    """
    ranks = request.ranks_per_node or site.ranks_per_node or 1
    gpus = site.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
    name = request.job_name or Path(request.words[0]).stem
    if not _NAME.fullmatch(name):
        msg = f"the name of the job is {name!r}; --job-name takes letters, digits, dots, dashes and underscores"
        raise ConfigError(msg)
    if request.array and not _ARRAY.fullmatch(request.array):
        msg = f"--array is {request.array!r}; expected numbers such as 0-9, 1,3,5 or 0-99%4"
        raise ConfigError(msg)
    return {
        "job_name": name,
        "nodes": str(request.nodes),
        "ranks_per_node": str(ranks),
        "cores_per_rank": str(cores_of(request, site, partition, ranks)),
        "time_limit": limit_of(request, site, partition),
        "array": request.array,
        "directives": "\n".join(f"#SBATCH {flag}" for flag in _flags(request, site, gpus)),
        "log_folder": _plain(request.run_folder),
        "work_folder": shlex.quote(str(request.work_folder)),
        "run_folder": shlex.quote(str(request.run_folder)),
        "forward": "pass_on" if request.saves_at_signal else ":",
        "setup": "\n".join(site.shell_lines) or ":",
        "mpi_plugin": site.mpi_plugin or default_plugin(),
        "srun_flags": "".join(f" {shlex.quote(flag)}" for flag in site.srun_flags),
        "environment": _staging(request),
        "python": '"$staged_python"' if request.is_staged else shlex.quote(request.python),
        "arguments": shlex.join(request.words),
        "image": shlex.quote(request.image),
        "container_command": shlex.quote(site.container_command),
        "container_flags": "".join(f" {shlex.quote(flag)}" for flag in site.container_flags),
    }


def _staging(request: Request) -> str:
    """Lines that copy the environment to the nodes; empty if the ranks start from where it is.

    Raises:
        UsageError: the ranks are in a container.
    """
    if not request.is_staged:
        return ""
    if request.image:
        msg = f"--stage-env: the image {request.image} has the environment in one file already; leave the option out"
        raise UsageError(msg)
    place = f" --stage-dir {shlex.quote(request.staged_place)}" if request.staged_place else ""
    words = shlex.join([request.python, *without_folder("mpispeed", "mpispeed.cli.main"), "stage"])
    part = (assets.folder("slurm") / "parts" / "staging.sh").read_text().rstrip("\n")
    return Template(part).substitute(staging_command=words, staging_options=place)


def cores_of(request: Request, site: Site, partition: Partition, ranks: int) -> int:
    """Cores of each of the `ranks` ranks of a node.

    Raises:
        UsageError: nobody says how many cores a node has.
        ConfigError: it has fewer than ranks.
    """
    if request.cores_per_rank:
        return request.cores_per_rank
    on_node = site.cores_per_node or partition.cores_per_node
    if not on_node:
        msg = "how many cores has a rank? give --cpus-per-task, or cores_per_node in the site's profile"
        raise UsageError(msg)
    if ranks > on_node:
        msg = f"{ranks} ranks on a node of {on_node} cores; ask for fewer with --ntasks-per-node"
        raise ConfigError(msg)
    return on_node // ranks


def _flags(request: Request, site: Site, gpus: int) -> list[str]:
    """Flags of sbatch that a template does not have itself."""
    memory = None if request.memory_bytes is None else f"{math.ceil(request.memory_bytes / _MIB)}M"
    known = {
        "partition": request.partition or site.partition,
        "account": request.account or site.account,
        "qos": request.qos or site.qos,
        "mem": memory,
        # Never per task: ranks of a node have to see each other's devices, and choose theirs by local rank.
        "gpus-per-node": gpus or None,
        "signal": f"B:USR1@{request.signal_seconds}" if request.signal_seconds else None,
    }
    given = (f"--{name}={value}" for name, value in known.items() if value)
    return lines_of([*given, *site.sbatch_flags, *request.flags])


def signal_seconds(time: str) -> int:
    """Seconds before the limit at which USR1 is sent, by default; 0 for not at all.

    A job spends the most of its time on training, and SLURM may send the signal a minute too early.
    """
    try:
        limit = seconds_of(time)
    except ValueError:
        return SIGNAL_SECONDS  # no time, which is refused elsewhere
    return max(0, min(SIGNAL_SECONDS, int(limit / 4) - 60))


def _plain(folder: Path) -> str:
    if not re.fullmatch(r"[\w./+=@:,-]+", str(folder)):
        msg = f"the run folder is {folder}; SLURM takes no spaces or special characters there; choose another --run-dir"
        raise ConfigError(msg)
    return str(folder)


def limit_of(request: Request, site: Site, partition: Partition) -> str:
    """The time limit of a job; one over the limits of its partition, or of too many nodes, would wait for ever.

    Raises:
        UsageError: nobody says how long the job may run.
        ConfigError: the limit is no time, or time or nodes are over those of the partition.
    """
    time = request.time or site.time
    if not time:
        msg = "how long may the job run? give --time, or time in the site's profile"
        raise UsageError(msg)
    try:
        wanted = seconds_of(time)
    except ValueError as error:
        msg = f"--time is {time!r}: {error}"
        raise ConfigError(msg) from error
    where = request.partition or site.partition or partition.name
    said = site.limits(where)
    for source, limit in ((site.name, said.max_time), ("SLURM", partition.max_time)):
        if limit and wanted > seconds_of(limit):
            msg = (
                f"--time {time} is more than {limit}, which is what {source} says partition {where or '(default)'} "
                "allows; ask for less, and let the run go on in the next job (walltime.chain in the config)"
            )
            raise ConfigError(msg)
    for source, nodes in ((site.name, said.max_nodes), ("SLURM", partition.max_nodes)):
        if nodes and request.nodes > nodes:
            msg = f"--nodes {request.nodes} is more than the {nodes} that {source} says {where or 'a job'} may have"
            raise ConfigError(msg)
    return time


def default_plugin() -> str:
    """The plugin of srun for the MPI that mpi4py will load."""
    if os.environ.get("MPI4PY_MPIABI") == "openmpi":
        return "pmix"
    try:
        family = find_mpirun().family
    except UsageError:
        family = Family.MPICH
    return "pmix" if family is Family.OPEN_MPI else "pmi2"


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill the template; return the script.

    Raises:
        UsageError: the template has names that nothing is known for, or a dollar sign that is no name.
    """
    text = read_template(template)
    if values.get("environment") and "$environment" not in text:
        msg = f"--stage-env: the template {template} has neither $prepare nor $environment, where that would be done"
        raise UsageError(msg)
    try:
        return Template(text).substitute(values)
    except KeyError as error:
        msg = f"the template {template} has ${error.args[0]}; known are {', '.join(sorted(values))} ($$ is a plain $)"
        raise UsageError(msg) from error
    except ValueError as error:
        msg = f"the template {template}: {error}; write $$ for a dollar sign of the shell"
        raise UsageError(msg) from error
