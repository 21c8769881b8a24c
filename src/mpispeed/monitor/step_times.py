"""Writes the duration of each step for `mpispeed scale`, which needs nothing else to compare sizes."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpispeed.base.events import Bus, Event

FILE = "MPISPEED_SCALE_FILE"
"""Variable that names the file; without it nothing is written."""


def watch(bus: Bus, **facts: Any) -> None:
    """Collect the times of this run if requested; call on rank 0."""
    if os.environ.get(FILE):
        facts["threads"] = int(os.environ.get("OMP_NUM_THREADS", "0").split(",")[0] or 0)
        StepTimes(Path(os.environ[FILE]), facts).attach(bus)


class StepTimes:
    """Collects the seconds of steps in memory and writes one line of JSON when the run ends.

    Args:
        path: the file, replaced if it is there.
        facts: what stands in it besides: ranks, samples_per_step, threads.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path, self._facts = path, dict(facts)
        self._seconds: list[float] = []

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps and of the run; a script need not close its engine."""
        bus.subscribe(Event.STEP_END, self._on_step)
        bus.subscribe(Event.CLOSE, lambda _: self.write())
        atexit.register(self.write)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._seconds.append(float(event["seconds"]))

    def write(self) -> None:
        """Write the file; the reader finds all of it or nothing."""
        if not self._seconds:
            return
        work = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        work.write_text(json.dumps({**self._facts, "step_seconds": self._seconds}) + "\n")
        work.replace(self._path)
