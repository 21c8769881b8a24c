"""The process that sends points to Weights & Biases and Comet: `python -m mpispeed.monitor.sender`, by `remote.py`.

Lines of JSON come in at descriptor 0, replies leave by descriptor 1. No signal ends the process; the end of its input
does, after what came before is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpispeed.monitor.service import Reply, Service

LINGER_SECONDS = 60.0
"""So long the process goes on when its rank was killed."""
_OWN_SHARE = 0.9  # of the time after which the rank ends the process
_TRY_SHARE = 0.3  # of that time, for an attempt to reach a server
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SETTINGS = (("WANDB_SILENT", "true"), ("WANDB_ERROR_REPORTING", "false"), ("COMET_DISABLE_AUTO_LOGGING", "1"))


def serve(lines: Iterable[bytes], reply: Reply) -> None:
    """Serve one run; returns when all is sent or time is up."""
    services: list[Service] = []
    close_seconds = 0.0
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:  # the rest of a line that a killed rank began
            break
        if "open" in message:
            folder, sections = Path(message["folder"]), message["open"]
            services = [Service(name, section, folder, message["program"], reply) for name, section in sections.items()]
            continue
        points = [(series, value, x, message["time"]) for series, value, x in message["points"]]
        for service in services if points else ():
            service.put(points)
        close_seconds = message["close"]
        if close_seconds:
            break
    now, seconds = time.monotonic(), _OWN_SHARE * close_seconds if close_seconds else LINGER_SECONDS
    end, offline = now + seconds, now + _TRY_SHARE * seconds
    for service in services:
        service.end(is_failed=not close_seconds)
    for service in services:
        service.go_offline(offline - time.monotonic())
    for service in services:
        service.join(end - time.monotonic())


def main() -> None:
    """Set the process up, serve, and leave without the libraries' own ends, which may wait for a server."""
    for number in _ENDING:
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN: the libraries' processes do not inherit it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _close_inherited()
    replies = os.dup(1)
    os.dup2(2, 1)
    for name, value in _SETTINGS:
        os.environ.setdefault(name, value)

    def reply(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the rank is gone
            os.write(replies, json.dumps(message).encode() + b"\n")

    serve(sys.stdin.buffer, reply)
    reply(kind="end")
    os._exit(0)


def _close_inherited() -> None:
    """Close what the rank had open: launchers and the MPI wait until the last process lets go of it."""
    own = Path("/proc/self/fd")
    numbers = [int(path.name) for path in own.iterdir()] if own.is_dir() else range(256)
    for number in numbers:
        if number > 2:
            with contextlib.suppress(OSError):
                os.close(number)


if __name__ == "__main__":
    main()
