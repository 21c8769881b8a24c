"""Floor 6, monitor: listens to events of a run and writes series of numbers, or a console.

Knows event names, this process' rank, and the libraries that sinks write with. Must not know the
engine or the configuration: sections arrive as plain dicts. Nothing here communicates.
"""

from __future__ import annotations

from mpispeed.base.events import Event
from mpispeed.monitor.console import Console
from mpispeed.monitor.sink import Sink, attach
from mpispeed.monitor.sinks import build

__all__ = ["Console", "Event", "Sink", "attach", "build"]
