"""Exit status of processes that are not our children, also after their parents have collected them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

# struct pidfd_info of linux/pidfd.h in its first size; the kernel fills what it knows and says so in the mask.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3

_STATE, _START, _EXIT_CODE = 0, 19, 49
"""Fields of /proc/PID/stat, counted behind the name, which may contain anything."""


@dataclass(frozen=True, slots=True)
class Status:
    """Exit code or signal of a process; both None if nobody kept it, which happens on kernels older than 6.15."""

    exit_code: int | None = None
    signal: int | None = None

    @property
    def is_known(self) -> bool:
        """True if it is known how the process ended."""
        return self.exit_code is not None or self.signal is not None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal} ({signal_name(self.signal)})"
        return "unknown" if self.exit_code is None else f"exit code {self.exit_code}"


def _is_readable(handle: int, limit_seconds: float) -> bool:
    """Wait for a descriptor; not by select, which knows none above 1023."""
    waiter = select.poll()
    waiter.register(handle, select.POLLIN)
    return bool(waiter.poll(1000 * limit_seconds))


def signal_name(number: int) -> str:
    """SIGKILL of 9, and the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def from_wait_status(raw: int) -> Status:
    """Return the status in a result of wait(2)."""
    if os.WIFSIGNALED(raw):
        return Status(signal=os.WTERMSIG(raw))
    return Status(exit_code=os.WEXITSTATUS(raw))


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Start of a process in clock ticks since boot; with the pid it identifies the process for ever."""
    fields = _stat(pid, proc)
    return int(fields[_START]) if fields else None


def _stat(pid: int, proc: Path) -> list[str]:
    try:
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


class ProcessWatch:
    """Waits for the end of any process of this node without being its parent.

    The kernel gives the status (6.15 and newer keep it for holders of a handle of the process), else it is read while
    the process is a zombie. `fileno` becomes readable at the end: a select on it wakes at once, usually before
    the parent collects the zombie.
    """

    def __init__(
        self,
        pid: int,
        started_ticks: int | None = None,
        *,
        handle: int | None = None,
        proc: Path = Path("/proc"),
    ) -> None:
        """Watch process `pid`.

        Args:
            pid: number of the process.
            started_ticks: its `start_ticks`, if the number may have gone to another process since.
            handle: a pidfd of it, opened while it lived for certain; given up by `close`.
            proc: where the kernel shows processes.
        """
        self.pid, self._proc = pid, proc
        self._status: Status | None = None
        self._handle = handle
        self._zombie: Status | None = None
        if handle is None:
            with contextlib.suppress(OSError, AttributeError):  # gone, or a kernel before 5.3
                self._handle = os.pidfd_open(pid)
        found = start_ticks(pid, proc)
        self._started = started_ticks if started_ticks is not None else found
        if found is None or found != self._started:
            self._end(self._ask() if found is None else None)

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None where the kernel has none."""
        return self._handle

    def poll(self) -> Status | None:
        """None while the process runs, then its status for ever; does not wait."""
        if self._status is not None:
            return self._status
        # A main thread can be a zombie while others of its process go on: the handle tells when all have ended.
        if self._handle is not None and not _is_readable(self._handle, 0.0):
            return None
        self._look_at_zombie()
        status = self._ask()
        if status is not None:
            return self._end(status)
        fields = _stat(self.pid, self._proc)
        if fields and int(fields[_START]) == self._started:
            # A zombie has its status, unless this process may not read it: then wait for the kernel's answer.
            return self._end(self._zombie) if fields[_STATE] in "ZX" and self._zombie else None
        return self._end(self._ask() or self._zombie)

    def wait(self, limit_seconds: float) -> Status | None:
        """Wait for the end; None if it does not come within the limit."""
        if self._status is None and self._handle is not None:
            _is_readable(self._handle, limit_seconds)
        return self.poll()

    def close(self) -> None:
        """Give the handle up."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _look_at_zombie(self) -> None:
        fields = _stat(self.pid, self._proc)
        if len(fields) > _EXIT_CODE and fields[_STATE] in "ZX" and int(fields[_START]) == self._started:
            self._zombie = from_wait_status(int(fields[_EXIT_CODE]))

    def _ask(self) -> Status | None:
        """The status that the kernel kept; None while the process runs, and on a kernel that keeps none."""
        if self._handle is None:
            return None
        buffer = bytearray(_INFO.pack(_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self._handle, _GET_INFO, buffer)
        except OSError:
            return None
        mask, *_, raw = _INFO.unpack(buffer)
        return from_wait_status(raw) if mask & _EXIT else None

    def _end(self, status: Status | None) -> Status:
        self._status = status or Status()
        self.close()
        return self._status


def wait_exit(pid: int, started_ticks: int | None = None) -> int | None:
    """Exit status as a shell has it: the exit code, or 128 + signal; None while the process runs.

    It opens and closes its own handle, so it can miss an end that a `ProcessWatch` held since the start would see; -1
    stands for a process of unknown status.
    """
    watch = ProcessWatch(pid, started_ticks)
    try:
        status = watch.poll()
    finally:
        watch.close()
    if status is None:
        return None
    if status.signal is not None:
        return 128 + status.signal
    return -1 if status.exit_code is None else status.exit_code
