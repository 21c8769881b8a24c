"""`memory_breakdown`: bytes of each kind of model state, and memory around the passes of a step."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpispeed.base.events import Event
from mpispeed.base.units import format_bytes
from mpispeed.engine.rank_numbers import ResidentMemory, device_bytes

if TYPE_CHECKING:
    from mpispeed.base.events import Bus
    from mpispeed.engine.build.parts import Parts

log = logging.getLogger(__name__)


class PassMemory:
    """The most memory that was seen before and after forward passes, and after backward passes, of each step.

    That of tensors on the device, or what is resident where there is none.
    """

    def __init__(self) -> None:
        self._resident = ResidentMemory()
        self._most: dict[str, float] = {}

    def attach(self, bus: Bus) -> None:
        """Listen to passes and steps."""
        bus.subscribe(Event.BATCH_START, lambda _: self._look("before forward"))
        bus.subscribe(Event.FORWARD_END, lambda _: self._look("after forward"))
        bus.subscribe(Event.BACKWARD_END, lambda _: self._look("after backward"))
        bus.subscribe(Event.STEP_END, lambda _: self._on_step())

    def _look(self, place: str) -> None:
        on_device = device_bytes()
        found = self._resident.nbytes() if math.isnan(on_device) else on_device
        self._most[place] = max(self._most.get(place, 0.0), found)

    def _on_step(self) -> None:
        self._look("after step")
        log.info("memory of passes | %s", _line({place: int(found) for place, found in self._most.items()}))
        self._most = {}


def report_memory(parts: Parts) -> None:
    """`memory_breakdown`: bytes of each kind of model state on rank 0 by tier, and the process's peak."""
    params, tiers, optimization = parts.params, parts.params.tiers, parts.optimization
    rows = {"parameters": params.shards.param_bytes, "masters": params.shards.master_bytes}
    files = {"parameters and masters": params.shards.swapped_bytes}
    if optimization is not None:
        rows["gradients"] = optimization.grads.shards.rest_bytes
        rows["optimizer state"] = optimization.states.state_bytes
        rows |= optimization.exchange.memory()
        files["gradients"] = optimization.grads.shards.swapped_bytes
        files["optimizer state"] = optimization.states.swapped_bytes
    if tiers.is_swapping:
        rows["swap buffers"] = tiers.buffer_bytes
    rows["peak resident"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log.info("memory | %s", _line(rows))
    if any(files.values()):
        log.info("swap files | %s", _line(files))


def _line(rows: Mapping[str, int]) -> str:
    return " | ".join(f"{name}: {format_bytes(size)}" for name, size in rows.items())
