"""Fills the batch script of a PBS job from a request and a site's profile, checks it and submits it."""

from __future__ import annotations

import math
import re
import shlex
import tempfile
from pathlib import Path
from string import Template

from mpispeed.base import assets
from mpispeed.base.commands import run_command
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.sbatch import Request, cores_of, limit_of
from mpispeed.launch.sites import Site, lines_of, seconds_of
from mpispeed.launch.submit import Checked, Partition, check_shell

SUBMIT_SECONDS = 120.0
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]{0,229}")
_MIB = 1 << 20


def fill(request: Request, site: Site) -> str:
    """The script of a job.

    Raises:
        ConfigError: something that is asked for cannot be.
        UsageError: something is missing that neither the request nor the site says.
    """
    ranks = request.ranks_per_node or site.ranks_per_node or 1
    cores = cores_of(request, site, Partition(), ranks)
    limit = int(seconds_of(limit_of(request, site, Partition())))
    if limit < 1:
        msg = "--time is 0, which PBS takes for no time at all; give the seconds, minutes or hours that the job needs"
        raise ConfigError(msg)
    if not _NAME.fullmatch(request.job_name):
        msg = f"the name of the job is {request.job_name!r}; PBS takes a letter, then letters, digits, dots and dashes"
        raise ConfigError(msg)
    if not re.fullmatch(r"[\w./+=@-]+", str(request.run_folder)):
        msg = f"the run folder is {request.run_folder}; PBS takes no spaces, commas or colons there, as it takes what "
        msg += "stands before a colon for a host; choose another --run-dir"
        raise ConfigError(msg)
    folder = assets.folder("slurm")
    again = (folder / "parts" / "resubmit.sh").read_text().rstrip("\n").replace("$$", "$") if request.requeues else ""
    return Template((folder / "templates" / "pbs.sh").read_text()).substitute(
        job_name=request.job_name,
        select=_select(request, site, ranks, cores),
        place="scatter" if request.nodes > 1 else "pack",
        time_limit=f"{limit // 3600:02d}:{limit // 60 % 60:02d}:{limit % 60:02d}",
        limit_seconds=str(limit),
        log_folder=str(request.run_folder),
        directives="\n".join(f"#PBS {flag}" for flag in _flags(request, site)),
        work_folder=shlex.quote(str(request.work_folder)),
        run_folder=shlex.quote(str(request.run_folder)),
        setup="\n".join(site.shell_lines) or ":",
        cores_per_rank=str(cores),
        python=shlex.quote(request.python),
        run_flags=shlex.join(request.run_flags),
        ranks=str(ranks * request.nodes),
        arguments=shlex.join(request.words),
        again=again,
    )


def _select(request: Request, site: Site, ranks: int, cores: int) -> str:
    gpus = site.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
    memory = request.memory_bytes or site.memory_bytes
    chunk = [str(request.nodes), f"ncpus={ranks * cores}", f"mpiprocs={ranks}", f"ompthreads={cores}"]
    chunk += [f"ngpus={gpus}"] if gpus else []
    chunk += [f"mem={math.ceil(memory / _MIB)}mb"] if memory else []
    return ":".join(chunk)


def _flags(request: Request, site: Site) -> list[str]:
    known = {"-q": request.partition or site.partition, "-A": request.account or site.account}
    return lines_of([*(f"{flag} {value}" for flag, value in known.items() if value), *request.flags])


def check(text: str) -> Checked:
    """Check a script with bash and shellcheck; nobody asks PBS, which has no test of jobs."""
    checked = Checked()
    with tempfile.TemporaryDirectory(prefix="mpispeed-qsub-") as folder:
        script = Path(folder) / "job.pbs"
        script.write_text(text)
        check_shell(checked, script)
    return checked


def submit(script: Path) -> str:
    """Submit a script by qsub; return the job's name.

    Raises:
        UsageError: there is no qsub, or it refuses.
    """
    try:
        done = run_command(["qsub", str(script)], seconds=SUBMIT_SECONDS)
    except OSError as error:
        msg = f"qsub cannot be called here ({error}); submit from a login node of the cluster, or use --output"
        raise UsageError(msg) from error
    if done.returncode:
        msg = f"qsub refuses {script}: {done.stderr.strip()}"
        raise UsageError(msg)
    return done.stdout.strip()
