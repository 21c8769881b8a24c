"""Sinks whose libraries run in a process of their own, so that no step waits for a network or for a library."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpispeed.base.plain import printable

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""So long the end of a run waits for the process, at most, unless MPISPEED_MONITOR_SECONDS says otherwise."""
MOST_BYTES = 4 << 20
"""Points that wait for a process that does not read; more are dropped."""
_RUN_DIR = "MPISPEED_RUN_DIR"
_SECONDS = "MPISPEED_MONITOR_SECONDS"
# Whatever would make a library there believe that it is a rank, or join the MPI's process manager.
_LAUNCHERS = (
    "PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_", "MPIEXEC_", "MPI_LOCAL", "I_MPI_", "MV2_", "PALS_",
    "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_MPI", "SLURM_SRUN",
)  # fmt: skip
_BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class RemoteSinks:
    """Sends points to the services of some sections, for rank 0 of a run; never fails and never waits for them.

    Points travel by a pipe that is written without waiting; what does not fit is kept up to MOST_BYTES. What the
    process says is logged at the next flush. If it ends or stops reading, one warning says so and the run goes on.

    Args:
        sections: settings by name of the service (wandb, comet), keys included.
        folder: for what cannot be sent; MPISPEED_RUN_DIR or else the working folder unless given.
        command: words that start the process.
        close_seconds: so long `close` waits; 0: as MPISPEED_MONITOR_SECONDS says, or else CLOSE_SECONDS.
    """

    def __init__(
        self,
        sections: Mapping[str, Mapping[str, Any]],
        folder: Path | None = None,
        *,
        command: Sequence[str] = (),
        close_seconds: float = 0,
    ) -> None:
        self._names = ", ".join(sections)
        self._close_seconds, self._owner = close_seconds or _asked_seconds(), os.getpid()
        self._points: list[tuple[str, float, int]] = []
        self._lines: deque[memoryview] = deque()
        self._bytes = self._dropped = 0
        self._heard = b""
        self._is_over = self._is_off = False
        folder = folder or Path(os.environ.get(_RUN_DIR) or ".")
        try:
            self._pid, self._out, self._in = _spawn(command or _command())
        except OSError as error:
            self._is_off = True
            log.warning("%s: nothing is sent, the process for it cannot be started: %s", self._names, error)
            return
        atexit.register(self.close)  # scripts need not destroy their engines
        program = Path(sys.argv[0]).name if sys.argv else ""
        # The keys go this way only: words and variables of a process are shown to others.
        self._put({"open": sections, "folder": str(folder.absolute()), "program": program})
        self._push()

    def write(self, series: str, value: float, x: int) -> None:
        """Keep one point for the next flush."""
        if not self._is_off:
            self._points.append((series, float(value), int(x)))

    def flush(self) -> None:
        """Send all points, as far as the pipe takes them now; log what the process says."""
        if self._is_off or os.getpid() != self._owner:
            return
        self._put_points()
        self._push()
        self._hear()

    def close(self) -> None:
        """Send the rest and wait for the process, at most `close_seconds`; then end it."""
        if self._is_off or os.getpid() != self._owner:
            return
        end = time.monotonic() + self._close_seconds
        self._put_points(close=self._close_seconds)
        while not self._is_off and time.monotonic() < end:
            self._push()
            self._wait(end - time.monotonic())
            self._hear()
        if not self._is_off:
            self._give_up(f"it did not end within {self._close_seconds:g} seconds and is stopped")
        atexit.unregister(self.close)

    def _wait(self, seconds: float) -> None:
        """Wait until the process says something, or takes something, if there is anything for it."""
        poll = select.poll()  # `select` knows only the first 1024 files of a process
        poll.register(self._in, select.POLLIN)
        if self._lines:
            poll.register(self._out, select.POLLOUT)
        poll.poll(1000 * max(0.0, seconds))

    def _put_points(self, *, close: float = 0) -> None:
        points, self._points = self._points, []
        if self._bytes > MOST_BYTES and points:
            if not self._dropped:
                log.warning("%s: the process for it takes no points; from now on they are dropped", self._names)
            self._dropped += len(points)
            points = []
        if points or close:
            self._put({"points": points, "time": time.time(), "close": close})

    def _put(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        self._lines.append(memoryview(line))
        self._bytes += len(line)

    def _push(self) -> None:
        try:
            while self._lines:
                sent = os.write(self._out, self._lines[0])
                self._bytes -= sent
                if sent < len(self._lines[0]):
                    self._lines[0] = self._lines[0][sent:]
                else:
                    self._lines.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._hear()
            if not self._is_off:
                self._give_up("the process for it ended")

    def _hear(self) -> None:
        """Log what was said; notice the end."""
        try:
            while read := os.read(self._in, 65536):
                self._heard += read
        except BlockingIOError:
            is_end = False
        except OSError:
            is_end = True
        else:
            is_end = True
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._say(line)
        if self._is_over:
            self._let_go()
        elif is_end and not self._is_off:
            self._give_up("the process for it ended")

    def _say(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            self._is_over = self._is_over or message["kind"] == "end"
            if message["kind"] != "end":
                level = logging.WARNING if message["kind"] == "warning" else logging.INFO
                log.log(level, "%s: %s", message["name"], printable(str(message["text"]), 1000))
        except (ValueError, KeyError, TypeError):
            log.debug("a line of the process for %s is not understood", self._names)

    def _give_up(self, why: str) -> None:
        more = f"; {self._dropped} points were dropped" if self._dropped else ""
        log.warning("%s: nothing more is sent, %s%s", self._names, why, more)
        self._let_go(is_killed=True)

    def _let_go(self, *, is_killed: bool = False) -> None:
        self._is_off = True
        self._lines.clear()
        self._points.clear()
        for handle in (self._out, self._in):
            os.close(handle)
        with contextlib.suppress(OSError):  # a script that waits for all of its children has taken it
            if is_killed:
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _asked_seconds() -> float:
    asked = os.environ.get(_SECONDS, "")
    try:
        return max(0.1, float(asked)) if asked else CLOSE_SECONDS
    except ValueError:
        log.warning(
            "%s is %s, which is no number of seconds; %g are used", _SECONDS, printable(asked, 40), CLOSE_SECONDS
        )
        return CLOSE_SECONDS


def _command() -> list[str]:
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "mpispeed.monitor.sender"]


def _spawn(command: Sequence[str]) -> tuple[int, int, int]:
    """Start the process; its number, the pipe to it, and the pipe from it, neither of which makes a caller wait.

    It is spawned, not forked: memory that an MPI has registered with a network card must not be shared. It has a
    session of its own, so that what a launcher or a terminal sends to a group of processes does not reach it.
    """
    package = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    actions = [
        (os.POSIX_SPAWN_DUP2, to_read, 0), (os.POSIX_SPAWN_DUP2, from_write, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]  # fmt: skip
    try:
        pid = os.posix_spawn(
            command[0], list(command), environment, file_actions=actions, setsid=True, setsigmask=_BLOCKED
        )
    except OSError:
        os.close(to_write)
        os.close(from_read)
        raise
    finally:
        os.close(to_read)
        os.close(from_write)
    os.set_blocking(to_write, False)
    os.set_blocking(from_read, False)
    return pid, to_write, from_read
