"""The process that sends points to Weights & Biases and Comet: `python -m mpispeed.monitor.sender`, by `remote.py`.

Lines of JSON come in at descriptor 0, replies leave by descriptor 1. Each service has a thread, so that one that hangs
keeps no points from the other. No signal ends the process; the end of its input does, after what came before is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mpispeed.base.plain import SET, printable
from mpispeed.monitor import comet_sink, wandb_sink

Point = tuple[str, float, int]
Reply = Callable[..., None]

LINGER_SECONDS = 60.0
"""So long the process goes on when its rank was killed."""
CLOSE_SECONDS = 4.5
"""So long if the rank waits for it; the rank itself ends it after 5."""
_PROBE_SECONDS = 3.0
_MOST_POINTS = 200_000  # that wait for one service
_MOST_OPENINGS = 3
_KEYS = ("WANDB_API_KEY", "COMET_API_KEY")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Service:
    """One service: the thread that writes its points.

    Args:
        name: of its section.
        section: its settings, with the key.
        folder: for what is not sent.
        program: name of the script.
        reply: tells rank 0 something.
    """

    def __init__(self, name: str, section: Mapping[str, Any], folder: Path, program: str, reply: Reply) -> None:
        self.name, self._section, self._folder, self._program, self._reply = name, section, folder, program, reply
        self._batches: queue.SimpleQueue[list[Point] | None] = queue.SimpleQueue()
        self._given = self._taken = self._openings = 0
        self._is_full = self._is_over = False
        self._sink: Any = None
        self._run_id: str | None = None
        keys = (section.get("api_key"), *map(os.environ.get, _KEYS))
        self._secrets = [str(key) for key in keys if key]
        self.is_failed = False  # the rank was killed
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, points: list[Point]) -> None:
        """Hand points over; they are dropped if the service is far behind."""
        if self._is_over:
            return
        if self._given - self._taken > _MOST_POINTS:
            if not self._is_full:
                self._warn(f"{_MOST_POINTS} points wait for it; from now on some are dropped")
            self._is_full = True
            return
        self._given += len(points)
        self._batches.put(points)

    def end(self) -> None:
        """Finish after the points that were handed over."""
        self._batches.put(None)

    def join(self, seconds: float) -> None:
        """Wait until it has finished, at most so long; say what is missing then."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            upload = f"; upload what it has by: {self._sink.upload}" if getattr(self._sink, "upload", "") else ""
            self._warn(f"it did not finish in time, {self._given - self._taken} points may be missing{upload}")

    def _serve(self) -> None:
        try:
            self._open_once()
            while (points := self._batches.get()) is not None:
                self._take(points)
                self._taken += len(points)
            self._sink.close(is_failed=self.is_failed)
        except Exception as error:
            self._is_over = True
            self._warn(f"nothing more is sent: {self._text(error)}")

    def _take(self, points: list[Point]) -> None:
        """Write points, with a sink made anew if its process is gone; of what that one held some may be lost."""
        while True:
            self._open_once()
            try:
                for series, value, x in points:
                    self._sink.write(series, value, x)
                self._sink.flush()
            except Exception as error:
                self._sink = None
                self._warn(f"it begins anew, offline: {self._text(error)}")
            else:
                return

    def _open_once(self) -> None:
        if self._sink is not None:
            return
        if self._openings == _MOST_OPENINGS:
            msg = f"it failed {_MOST_OPENINGS} times"
            raise OSError(msg)
        self._openings += 1
        is_online, why = self._is_online()
        if is_online:
            try:
                self._sink = self._made(is_online=True)
                self._reply(kind="info", name=self.name, text=f"sent to {self._sink.where}")
            except Exception as error:
                why = self._text(error)
        if self._sink is None:
            self._sink = self._made(is_online=False)
            text = f"written to {self._sink.where}, to be uploaded by: {self._sink.upload}"
            if self._sink.upload:
                self._reply(kind="warning" if why else "info", name=self.name, text=text + (why and f" ({why})"))
        self._run_id = self._sink.run_id

    def _is_online(self) -> tuple[bool, str]:
        """Whether to send now, and why not if the user wants it."""
        module = wandb_sink if self.name == "wandb" else comet_sink
        if self._openings > 1 or not module.wants_network(self._section):
            return False, ""
        why = unreachable(module.server())
        return not why, why

    def _made(self, *, is_online: bool) -> Any:
        kind = wandb_sink.WandbSink if self.name == "wandb" else comet_sink.CometSink
        return kind(self._section, self._folder, is_online=is_online, run_id=self._run_id, program=self._program)

    def _text(self, error: BaseException) -> str:
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, SET)
        return printable(text, 400)

    def _warn(self, text: str) -> None:
        self._reply(kind="warning", name=self.name, text=text)


def unreachable(address: str, seconds: float = _PROBE_SECONDS) -> str:
    """Why no answer comes from a server, or nothing if one does; the libraries would try for half a minute."""
    found: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(address, timeout=seconds):
                found.append("")
        except urllib.error.HTTPError:
            found.append("")  # an answer
        except Exception as error:
            reason = getattr(error, "reason", error)
            # Authorities that a site adds for its proxy are known to the libraries by their own settings.
            found.append("" if "CERTIFICATE" in str(reason).upper() else f"no answer from {address}: {reason}")

    # In a thread, because looking up a name has no time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return found[0] if found else f"no answer from {address} in {seconds + 1:g} seconds"


def serve(lines: Iterable[bytes], reply: Reply) -> None:
    """Serve one run; returns when all is sent or time is up."""
    lines = iter(lines)
    services: list[Service] = []
    is_closed = False
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:  # the rest of a line that a killed rank began
            break
        if "open" in message:
            folder = Path(message["folder"])
            services = [
                Service(name, section, folder, message["program"], reply) for name, section in message["open"].items()
            ]
        for service in services if message.get("points") else ():
            service.put([(series, value, x) for series, value, x in message["points"]])
        if message.get("close"):
            is_closed = True
            break
    end = time.monotonic() + (CLOSE_SECONDS if is_closed else LINGER_SECONDS)
    for service in services:
        service.is_failed = not is_closed
        service.end()
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
    for name, value in (
        ("WANDB_SILENT", "true"), ("WANDB_ERROR_REPORTING", "false"), ("COMET_DISABLE_AUTO_LOGGING", "1"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)

    def reply(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the rank is gone
            os.write(replies, json.dumps(message).encode() + b"\n")

    serve(sys.stdin.buffer, reply)
    reply(kind="end")
    os._exit(0)


def _close_inherited() -> None:
    """Close what the rank had open: launchers and the MPI wait until the last process lets go of it."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(256)):  # noqa: PTH112, PTH208
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


if __name__ == "__main__":
    main()
