"""DeepSpeed's classes of monitors: each writes points of one section's service, on rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpispeed import monitor
from mpispeed.config.monitor import MonitorConfig, reveal
from mpispeed.config.section import Section
from mpispeed.mesh.world import current
from mpispeed.monitor.by_hand import Monitors


class _OneMonitor:
    """The settings of a section as attributes, and the writing of points."""

    _name: str
    enabled: bool

    def __init__(self, config: Section) -> None:
        for key in type(config).model_fields:
            setattr(self, key, getattr(config, key))
        self._monitors = _monitors(self._name, config)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write points of series: (name, value, samples). Local; ranks other than 0 write nothing."""
        self._monitors.write_events(event_list)


class TensorBoardMonitor(_OneMonitor):
    """Writes to TensorBoard."""

    _name = "tensorboard"


class CsvFiles(_OneMonitor):
    """Writes to CSV files; DeepSpeed's `csvMonitor`."""

    _name = "csv_monitor"


class WandbMonitor(_OneMonitor):
    """Writes to Weights & Biases."""

    _name = "wandb"


class CometMonitor(_OneMonitor):
    """Writes to Comet."""

    _name = "comet"


class MonitorMaster:
    """Writes to all services that are enabled.

    Attributes:
        enabled: any is.
        tb_monitor, csv_monitor, wandb_monitor, comet_monitor: each of them.
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        self.enabled = monitor_config.enabled
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.csv_monitor = CsvFiles(monitor_config.csv_monitor)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.comet_monitor = CometMonitor(monitor_config.comet)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write points of series to each. Local; ranks other than 0 write nothing."""
        points = list(event_list)
        for one in (self.tb_monitor, self.csv_monitor, self.wandb_monitor, self.comet_monitor):
            one.write_events(points)


def _monitors(name: str, config: Section) -> Monitors:
    section, world = reveal(config), current()
    sinks = monitor.build({name: section}, world.rank if world is not None else 0)
    return Monitors(sinks, enabled=bool(section["enabled"]))
