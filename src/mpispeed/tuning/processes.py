"""All processes of a job on this machine, so that none of them outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_SECONDS = 3.0
"""Time for processes to end with their job: some write last lines of a log."""


def marked(mark: str) -> Iterator[int]:
    """Processes of this user whose environment at their start had the text "NAME=VALUE"; those that have ended do not.

    Children whose parents have gone are among them, which no tree of processes has.
    """
    wanted = b"\0" + mark.encode() + b"\0"
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in b"\0" + path.read_bytes():
                yield int(path.parent.name)


def end_all(mark: str) -> None:
    """Let them end by themselves for a short time, and kill the rest; returns when they have gone."""
    if _are_gone(mark):
        return
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    _are_gone(mark)


def _are_gone(mark: str) -> bool:
    """Wait a short time; False if some are still there."""
    end = time.monotonic() + GRACE_SECONDS
    while any(marked(mark)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
