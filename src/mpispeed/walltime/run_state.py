"""`state.json` in the folder of a run: its last state, for the batch script and for the run that follows."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RUN_DIR = "MPISPEED_RUN_DIR"
NAME = "state.json"

RUNNING, FINISHED, INTERRUPTED, STOPPED, FAILED = "running", "finished", "interrupted", "stopped", "failed"
"""Only an interrupted run wants to go on in another job."""


def run_folder(environ: Mapping[str, str], otherwise: Path) -> Path:
    """The folder of this run, or the given one where none was named."""
    return Path(environ[RUN_DIR]) if environ.get(RUN_DIR) else otherwise


def now_text() -> str:
    """The present time, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True, slots=True)
class RunState:
    """Contents of the file.

    Attributes:
        state: running, finished, interrupted (goes on in the next job), stopped (does not by itself) or failed.
        tag: of the last checkpoint that the run made by itself, "" if none.
        step: global step.
        reason: why it ended.
        job: SLURM's number of the job, "" without SLURM.
        time: when this was written.
        save_dir: folder of the checkpoints.
        first_step: global step at which this job began.
        save_seconds: what a save took at most.
        next_job: the job that was submitted to go on, "" if none.
        link: how many jobs of the chain came before this one.
    """

    state: str
    tag: str = ""
    step: int = 0
    reason: str = ""
    job: str = ""
    time: str = field(default_factory=now_text)
    save_dir: str = ""
    first_step: int = 0
    save_seconds: float = 0.0
    next_job: str = ""
    link: int = 0

    def write(self, folder: Path) -> None:
        """Replace the file in one go: whoever reads it finds the old one or this one.

        Raises:
            OSError: the file system refuses.
        """
        folder.mkdir(parents=True, exist_ok=True)
        work = folder / f".{NAME}.{os.getpid()}"
        try:
            with work.open("w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            work.replace(folder / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                work.unlink()
            raise


def read(folder: Path) -> RunState | None:
    """Read the state that the last run in this folder left; None if there is none that can be read."""
    try:
        found: Any = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("state"), str):
        return None
    defaults = {one.name: one.default for one in fields(RunState) if isinstance(one.default, (str, int, float))}
    known = {name: found[name] for name, value in defaults.items() if isinstance(found.get(name), type(value))}
    return RunState(found["state"], **known)
