"""Floor 6, monitor: listens to events of a run and writes series of numbers, or a console.

Knows event names, this process' rank, and the libraries that sinks write with. Must not know the
engine or the configuration: sections arrive as plain dicts. Nothing here communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.events import Event
from mpispeed.monitor.sink import Sink, attach
from mpispeed.monitor.sinks import build

if TYPE_CHECKING:
    from mpispeed.monitor.console import Console as Console

__all__ = ["Console", "Event", "Sink", "attach", "build"]


def __getattr__(name: str) -> Any:
    # Imported on first use: it knows the mesh and so imports torch, which the process of `remote.py` starts without.
    if name == "Console":
        from mpispeed.monitor.console import Console

        return Console
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
