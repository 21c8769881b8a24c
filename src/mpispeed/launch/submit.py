"""Checks a batch script and submits it; asks SLURM for a partition's limits and for jobs that have ended."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpispeed.base.commands import run_command
from mpispeed.base.errors import UsageError
from mpispeed.walltime.job_states import is_over

ANSWER_SECONDS, SUBMIT_SECONDS = 20, 120
"""SLURM's clients try for a minute to find their configuration; it is there at once or not at all."""

_PLACEHOLDER = re.compile(r"(?m)^#SBATCH.*\$.*$")
# A mere oddity does not keep a user's own template from being submitted.
_SHELLCHECK = ("shellcheck", "--shell=bash", "--severity=error")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Partition:
    """SLURM's description of a partition; None for unknown values."""

    name: str = ""
    max_time: str | None = None
    max_nodes: int | None = None
    cores_per_node: int | None = None
    memory_per_node_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a script's checks: reasons not to submit it, and checks that were not possible."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ask_partition(name: str = "") -> Partition:
    """Ask SLURM for a partition, or for the default one; empty if it does not answer.

    Raises:
        UsageError: SLURM answers that the partition does not exist.
    """
    if shutil.which("sinfo") is None or "," in name:  # SLURM chooses one of several
        return Partition(name)
    # Columns: name (* is the default), limits of time and nodes, nodes, least cores and memory of a node.
    answer = _call(["sinfo", "--noheader", "--format=%P|%l|%s|%D|%c|%m"])
    if answer is None or answer.returncode:
        return Partition(name)
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 5]
    wanted = [row for row in rows if row[0].rstrip("*") == name or (not name and row[0].endswith("*"))]
    if not wanted and name and rows:
        known = ", ".join(sorted({row[0].rstrip("*") for row in rows}))
        msg = f"SLURM has no partition {name!r}; it has {known}"
        raise UsageError(msg)
    return _read_rows(name, wanted)


def _read_rows(name: str, rows: Sequence[Sequence[str]]) -> Partition:
    """Read the answer's rows; a partition has one for each kind of node."""
    if not rows:
        return Partition(name)
    first = rows[0]
    cores = [int(row[4].rstrip("+")) for row in rows if row[4].rstrip("+").isdigit()]
    memory = [int(row[5].rstrip("+")) for row in rows if row[5].rstrip("+").isdigit()]
    nodes = [int(row[3]) for row in rows if row[3].isdigit()]
    most = first[2].rpartition("-")[2]
    return Partition(
        first[0].rstrip("*"),
        None if first[1] in ("infinite", "n/a") else first[1],
        min([int(most)] if most.isdigit() else [], default=sum(nodes) or None),
        min(cores, default=None),
        min(memory, default=0) * _MIB or None,
    )


def check_script(text: str) -> Checked:
    """Check a script with the available tools: bash, shellcheck, and SLURM if it answers."""
    checked = Checked()
    if not text.startswith("#!"):
        checked.problems.append("its first line is no #!, such as #!/bin/bash; SLURM refuses it")
    checked.problems.extend(f"SLURM replaces no variables in {line!r}" for line in _PLACEHOLDER.findall(text))
    with tempfile.TemporaryDirectory(prefix="mpispeed-sbatch-") as folder:
        script = Path(folder) / "job.sbatch"
        script.write_text(text)
        check_shell(checked, script)
        _ask_slurm(checked, script)
    return checked


def check_shell(checked: Checked, script: Path) -> None:
    """Add what bash and shellcheck say of a script."""
    _ask(checked, ["bash", "-n", str(script)], "bash -n")
    _ask(checked, [*_SHELLCHECK, str(script)], "shellcheck")


def _ask(checked: Checked, words: Sequence[str], name: str) -> None:
    answer = _call(words)
    if answer is None:
        checked.notes.append(f"not checked with {name}: it is not there")
    elif answer.returncode:
        checked.problems.append(f"{name}: {(answer.stderr + answer.stdout).strip()}")


def _ask_slurm(checked: Checked, script: Path) -> None:
    """Run `sbatch --test-only`, which reports what would be refused, if a controller answers."""
    if shutil.which("sbatch") is None:
        checked.notes.append("not checked with sbatch --test-only: no SLURM is installed here")
        return
    ping = _call(["scontrol", "ping"])
    if ping is None or ping.returncode or " UP" not in ping.stdout:
        checked.notes.append("not checked with sbatch --test-only: no controller of SLURM answers here")
        return
    answer = _call(["sbatch", "--test-only", str(script)])
    if answer is None or answer.returncode:
        said = "no answer" if answer is None else (answer.stderr + answer.stdout).strip()
        checked.problems.append(f"sbatch --test-only: {said}")


def submit(script: Path, *flags: str) -> str:
    """Submit a script by sbatch; return the number of the job.

    Raises:
        UsageError: there is no sbatch, or it refuses.
    """
    answer = _call(["sbatch", "--parsable", *flags, str(script)], SUBMIT_SECONDS)
    if answer is None:
        msg = "there is no sbatch here, or it does not answer; submit from a login node of the cluster, or use --output"
        raise UsageError(msg)
    if answer.returncode:
        msg = f"sbatch refuses {script}: {answer.stderr.strip()}"
        raise UsageError(msg)
    return answer.stdout.strip().split(";")[0]


def ended_of(jobs: Sequence[str]) -> set[str] | None:
    """Jobs that are over, or unknown to SLURM, by one question; None without an answer.

    Raises:
        UsageError: there is no squeue here.
    """
    if shutil.which("squeue") is None:
        msg = "there is no squeue here; look at the jobs yourself, then read what they wrote with --collect"
        raise UsageError(msg)
    answer = _call(["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i %T"])
    if answer is None:
        return None
    if answer.returncode:
        # A single job that is long over is an error to squeue; of several those are not named.
        return set(jobs) if len(jobs) == 1 and "invalid job id" in answer.stderr.lower() else None
    states = dict(line.split()[:2] for line in answer.stdout.splitlines() if len(line.split()) > 1)
    return {job for job in jobs if is_over(states.get(job, "COMPLETED"))}


def _call(words: Sequence[str], seconds: float = ANSWER_SECONDS) -> subprocess.CompletedProcess[str] | None:
    """Return a command's output; None if it is missing or does not answer."""
    try:
        return run_command(words, seconds=seconds)
    except OSError:
        return None
