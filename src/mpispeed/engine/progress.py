"""The progress line that DeepSpeed users know, every `steps_per_print` steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mpispeed.base.events import Bus, Event
from mpispeed.base.units import format_duration

log = logging.getLogger(__name__)


class Progress:
    """Logs `step=, loss=, lr=, norm=` and the time of a step; attached on rank 0."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._skipped = 0

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        bus.subscribe(Event.STEP_END, self._on_step)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._skipped += bool(event["skipped"])
        if event["global_step"] % self._every == 0:
            log.info(
                "step=%d, skipped=%d, loss=%.4f, lr=%.3e, norm=%.3f, time=%s",
                event["global_step"],
                self._skipped,
                event["loss"],
                event["lr"],
                event["norm"],
                format_duration(event["seconds"]),
            )
