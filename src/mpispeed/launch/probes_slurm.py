"""Probe of the SLURM job around us."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping

from mpispeed.launch import srun
from mpispeed.launch.findings import Finding, Verdict
from mpispeed.launch.probes import call

AREA = "SLURM"
SECONDS = 15.0
SHORT_SECONDS = 600


def check_slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings of this area."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        has_srun = shutil.which("srun", path=environ.get("PATH")) is not None
        text = "srun is there; not inside a job" if has_srun else "no srun on PATH"
        yield Finding(AREA, "SLURM", Verdict.INFO, text)
        return
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "?"))
    place = "batch script or shell" if srun.is_inside_allocation(environ) else "step"
    text = f"inside job {job} on {nodes} node{'' if nodes == '1' else 's'} ({place})"
    cure = "" if place == "step" else "`srun mpispeed doctor` looks at all ranks"
    yield Finding(AREA, "SLURM", Verdict.INFO, text, cure)
    about = _show(["scontrol", "show", "job", job], environ)
    if about is None:
        what = "scontrol does not answer here, as inside many containers"
        yield Finding(AREA, "controller", Verdict.INFO, what, "give the end of the job with --walltime")
        return
    yield check_time(about)
    yield check_requeue(about)
    settings = _show(["scontrol", "show", "config"], environ) or {}
    yield from check_settings(settings, environ)


def _show(argv: list[str], environ: Mapping[str, str]) -> dict[str, str] | None:
    """Name -> value of scontrol's output; None if it does not answer."""
    code, out, _ = call(argv, seconds=SECONDS, environ=environ)
    return parse(out) if code == 0 else None


def parse(text: str) -> dict[str, str]:
    """Name -> value of "Name=value Name=value" and of lines "Name = value"."""
    lines = re.findall(r"(?m)^(\w+)\s+= (.*?)\s*$", text)
    return dict(lines or re.findall(r"(\w+)=(\S*)", text))


def seconds_of(text: str) -> int | None:
    """Seconds of D-HH:MM:SS; None if it is no time."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def check_time(job: Mapping[str, str]) -> Finding:
    """Time that the job may still run."""
    limit, ran = job.get("TimeLimit", ""), job.get("RunTime", "")
    most, so_far = seconds_of(limit), seconds_of(ran)
    if most is None or so_far is None:
        return Finding(AREA, "time left", Verdict.INFO, f"limit {limit or 'unknown'}, so far {ran or 'unknown'}")
    left = max(0, most - so_far)
    text = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} of {limit}"
    if left < SHORT_SECONDS:
        cure = "a run saves itself before the end if walltime.save_dir is set; or ask for more with --time"
        return Finding(AREA, "time left", Verdict.WARN, text, cure)
    return Finding(AREA, "time left", Verdict.OK, text)


def check_requeue(job: Mapping[str, str]) -> Finding:
    """Finding on SLURM's right to start the job again."""
    if job.get("Requeue") == "1":
        return Finding(AREA, "requeue", Verdict.OK, f"allowed; restarts so far {job.get('Restarts', '0')}")
    cure = 'submit with --requeue for walltime.chain "requeue"; "dependency" needs none'
    return Finding(AREA, "requeue", Verdict.INFO, "not allowed for this job", cure)


def check_settings(settings: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Defaults of the site that decide how ranks start and end."""
    kills = settings.get("KillOnBadExit", environ.get("SLURM_KILL_BAD_EXIT", ""))
    if kills == "1" or environ.get("SLURM_KILL_BAD_EXIT") == "1":
        yield Finding(AREA, "KillOnBadExit", Verdict.OK, "1: a step ends when a rank fails")
    else:
        cure = "`srun --kill-on-bad-exit=1`, as `mpispeed run` does, or SLURM_KILL_BAD_EXIT=1"
        text = f"{kills or 'unknown'}: without the flag, ranks wait for one that has failed"
        yield Finding(AREA, "KillOnBadExit", Verdict.INFO, text, cure)
    plugin = settings.get("MpiDefault", "unknown")
    asked = environ.get("SLURM_MPI_TYPE")
    text = f"{plugin}" + (f"; SLURM_MPI_TYPE {asked}" if asked else "")
    cure = "`srun --mpi=pmi2` for MPICH and Intel MPI, `srun --mpi=pmix` for Open MPI; `mpispeed run` does it by itself"
    needs = (asked or plugin) in ("none", "unknown")
    yield Finding(AREA, "MpiDefault", Verdict.INFO if needs else Verdict.OK, text, cure if needs else "")
