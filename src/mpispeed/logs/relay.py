"""Process that copies a rank's output to its destination and, with times, to its log.

    python -I -S relay.py OUT_HANDLE ERR_HANDLE LOG HEAD

It outlives a rank that is killed, so nothing that the rank has written is lost; it ends when nobody can write any more.
A script that imports nothing of the package, because it starts once for every rank.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

CHUNK_BYTES = 1 << 16
LONGEST_BYTES = 1 << 16
"""A line without end, such as a progress bar's, is entered in pieces of this size."""

_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
"""Signals to a whole job are for its ranks; the relay still has to take their last words."""


class Stream:
    """One of the two streams: where it comes from, where it goes, and the unfinished line."""

    def __init__(self, source: int, target: int, mark: bytes) -> None:
        self.source, self.mark = source, mark
        self._target: int | None = target
        self._rest = b""

    def forward(self, data: bytes) -> None:
        """Pass data on; when nobody reads them any more they are dropped here, and still logged."""
        while data and self._target is not None:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:
                select.select([], [self._target], [], 1.0)
            except OSError:
                self._target = None

    def lines(self, data: bytes) -> list[bytes]:
        """Lines completed by `data`; at the end of the stream, which is empty data, the unfinished one."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > LONGEST_BYTES):
            whole.append(self._rest)
            self._rest = b""
        return whole


def stamp(seconds: float) -> bytes:
    """UTC to the microsecond, in a form that sorts: nodes may have other time zones, and an hour comes twice a year."""
    whole = int(seconds)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(whole))}.{int(1e6 * (seconds - whole)):06d}".encode()


def relay(streams: list[Stream], log: int | None, head: bytes) -> None:
    """Copy until both streams have ended."""
    open_now = {stream.source: stream for stream in streams}
    poller = select.poll()
    for source in open_now:
        poller.register(source, select.POLLIN)
    log = _enter(log, stamp(time.time()) + b" - " + head + b"\n")
    while open_now:
        for source, _ in poller.poll():
            stream, data = open_now[source], os.read(source, CHUNK_BYTES)
            stream.forward(data)
            before = stamp(time.time()) + b" " + stream.mark + b" "
            log = _enter(log, b"".join(before + line + b"\n" for line in stream.lines(data)))
            if not data:
                poller.unregister(source)
                del open_now[source]


def _enter(log: int | None, data: bytes) -> int | None:
    """Write to the log; on a full disk these lines are lost, and nothing else."""
    while data and log is not None:
        try:
            data = data[os.write(log, data) :]
        except OSError:
            return log
    return log


def main(words: list[str]) -> None:
    """Entry point; `words` are the arguments of the command line."""
    for name in _DEAF_TO:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    out, err, path, head = words
    try:
        log: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        log = None
    relay([Stream(int(out), 1, b"o"), Stream(int(err), 2, b"e")], log, os.fsencode(head))


if __name__ == "__main__":
    main(sys.argv[1:])
