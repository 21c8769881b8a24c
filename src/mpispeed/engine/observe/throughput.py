"""`timers.throughput`: DeepSpeed's line of samples per second, every `steps_per_print` steps."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.device import module_of
from mpispeed.base.events import Event
from mpispeed.engine.rank_numbers import ResidentMemory, device_bytes

if TYPE_CHECKING:
    from mpispeed.base.events import Bus
    from mpispeed.engine.build.parts import Parts
    from mpispeed.monitor.by_hand import Throughput

log = logging.getLogger(__name__)

GB = 1 << 30


class Speed:
    """Writes the line once the average has begun.

    With `timers.throughput.synchronized` it waits for the device first. Between two lines nothing waits: what the
    device is behind then, it is not behind at the next line.
    """

    def __init__(self, parts: Parts, throughput: Throughput, every: int) -> None:
        """Args: `throughput` hears of steps before this does."""
        self._parts, self._throughput, self._every = parts, throughput, every
        device = parts.plan.device
        waits = device.type != "cpu" and parts.plan.config.timers.throughput.synchronized
        self._waited_for = device if waits else None
        self._resident = ResidentMemory()

    def attach(self, bus: Bus) -> None:
        """Listen to the end of steps."""
        bus.subscribe(Event.STEP_END, self._on_step)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        if event["global_step"] % self._every or not self._throughput.total_elapsed_time:
            return
        begin = time.perf_counter()
        if self._waited_for is not None:
            module_of(self._waited_for).synchronize(self._waited_for)
        waited, parts, throughput = time.perf_counter() - begin, self._parts, self._throughput
        average = throughput.avg_samples_per_sec() * throughput.total_elapsed_time
        loader = parts.features.published.get("training_dataloader")
        now, most = self._memory()
        log.info(
            "epoch=%d/micro_step=%d/global_step=%d, RunningAvgSamplesPerSec=%s, CurrSamplesPerSec=%s, "
            "MemAllocated=%sGB, MaxMemAllocated=%sGB",
            0 if loader is None else loader.epoch,
            parts.counters.micro_steps + 1,
            event["global_step"],
            average / (throughput.total_elapsed_time + waited),
            parts.plan.batch.train_batch_size / (event["seconds"] + waited),
            round(now / GB, 2),
            round(most / GB, 2),
        )

    def _memory(self) -> tuple[float, float]:
        """Bytes now and at most, of tensors on the device or of what is resident."""
        on_device = device_bytes()
        if not math.isnan(on_device):
            return on_device, float(torch.cuda.max_memory_allocated())
        now = self._resident.nbytes()
        # The kernel brings its highest mark up to date later than what is resident now.
        return now, max(now, 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
