"""Time left for a job of PBS, by `qstat -f`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

from mpispeed.base.commands import run_command
from mpispeed.base.units import parse_duration

ANSWER_SECONDS = 10.0
_FIELD = re.compile(r"(?m)^\s+([\w.]+) = (.*)$")


def job_id(environ: Mapping[str, str]) -> str:
    """This job's name for PBS's commands; "" outside of PBS."""
    return environ.get("PBS_JOBID", "")


def ask_pbs(job: str) -> float:
    """Seconds that a job has left, by PBS; infinite without a limit.

    Raises:
        OSError: there is no qstat, or it does not answer in time.
        ValueError: the answer is no time.
    """
    done = run_command(["qstat", "-f", job], seconds=ANSWER_SECONDS)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"qstat ended with {done.returncode}")
    return read_left(done.stdout, time.time())


def read_left(text: str, now: float) -> float:
    """Seconds of an answer of `qstat -f`: the limit less the time since the start, or less the time used.

    PBS learns of the time used every few minutes only, so that the later of both counts.

    Args:
        text: the answer.
        now: seconds since 1970.

    Raises:
        ValueError: the answer is none, or its limit is no time.
    """
    fields = dict(_FIELD.findall(text.replace("\n\t", "")))
    if not fields:
        msg = f"qstat answered {text.strip()[:80]!r}, which tells of no job"
        raise ValueError(msg)
    limit = fields.get("Resource_List.walltime")
    if limit is None:
        return math.inf
    used = parse_duration(fields.get("resources_used.walltime", "0"))
    return parse_duration(limit) - max(used, now - _start(fields.get("stime", ""), now))


def _start(text: str, now: float) -> float:
    """Seconds since 1970 at the start; `now` where it is not told, or in words of another language."""
    try:
        return min(now, time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y")))
    except (ValueError, OverflowError):
        return now
