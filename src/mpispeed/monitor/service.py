"""One service that gets the points of a run: the thread that opens it, online or offline, and writes."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpispeed.base.plain import SET, printable
from mpispeed.monitor.comet_sink import CometSink
from mpispeed.monitor.wandb_sink import WandbSink

Point = tuple[str, float, int, float]
"""Series, value, samples, and seconds since 1970."""
Reply = Callable[..., None]

KINDS: dict[str, type[WandbSink] | type[CometSink]] = {"wandb": WandbSink, "comet": CometSink}
_MODULES = {"wandb": "wandb", "comet": "comet_ml"}
_LOADING = threading.Lock()
_PROBE_SECONDS = 3.0
_MOST_POINTS = 200_000  # that wait
_MOST_OPENINGS = 3
_KEYS = ("WANDB_API_KEY", "COMET_API_KEY")


class Service:
    """Writes points by a thread, so that a service that hangs keeps none from another.

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
        self._is_full = self._is_over = self._is_failed = self._is_trying = False
        self._sink: WandbSink | CometSink | None = None
        self._run_id: str | None = None
        keys = (section.get("api_key"), *map(os.environ.get, _KEYS))
        self._secrets = [str(key) for key in keys if key]
        self._begin()

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

    def end(self, *, is_failed: bool) -> None:
        """Finish after the points that were handed over; the run `is_failed` if its rank was killed."""
        self._is_failed = is_failed
        self._batches.put(None)

    def go_offline(self, seconds: float) -> None:
        """If after so long the library still tries to reach its server, write what waits offline."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive() and self._is_trying:
            self._begin("the run ended before its server was reached")

    def join(self, seconds: float) -> None:
        """Wait until it has finished, at most so long; say what is missing then."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            upload = f"; upload what it has by: {self._sink.upload}" if self._sink and self._sink.upload else ""
            self._warn(f"it did not finish in time, {self._given - self._taken} points may be missing{upload}")

    def _begin(self, why_offline: str = "") -> None:
        self._thread = threading.Thread(target=self._serve, args=(why_offline,), name=self.name, daemon=True)
        self._thread.start()

    def _serve(self, why_offline: str) -> None:
        try:
            with _LOADING:
                _load(_MODULES[self.name])
            sink = self._opened(why_offline)
            while (points := self._batches.get()) is not None:
                sink = self._take(sink, points)
                self._taken += len(points)
            sink.close(is_failed=self._is_failed)
        except Exception as error:
            self._is_over = True
            self._warn(f"nothing more is sent: {self._text(error)}")

    def _take(self, sink: WandbSink | CometSink, points: list[Point]) -> WandbSink | CometSink:
        """Write points; with a new sink if the library's process is gone, which may have lost some."""
        while True:
            try:
                for series, value, x, seconds in points:
                    sink.write(series, value, x, time=seconds)
                sink.flush()
            except Exception as error:
                sink.abandon()
                self._sink = None
                sink = self._opened(f"begun anew: {self._text(error)}")
            else:
                return sink

    def _opened(self, why_offline: str = "") -> WandbSink | CometSink:
        """A sink; one that sends, unless there is a reason against it."""
        if self._openings == _MOST_OPENINGS:
            msg = f"it failed {_MOST_OPENINGS} times"
            raise OSError(msg)
        self._openings += 1
        sink = None
        if not why_offline and KINDS[self.name].wants_network(self._section):
            sink, why_offline = self._tried()
        if sink is None:
            sink = self._made(is_online=False)
            text = f"written to {sink.where}, to be uploaded by: {sink.upload}"
            if sink.upload and why_offline:
                self._warn(f"{text} ({why_offline})")
            elif sink.upload:
                self._reply(kind="info", name=self.name, text=text)
        else:
            self._reply(kind="info", name=self.name, text=f"sent to {sink.where}")
        self._sink, self._run_id = sink, sink.run_id
        return sink

    def _tried(self) -> tuple[WandbSink | CometSink | None, str]:
        """A sink that sends, or why there is none."""
        server, sink = KINDS[self.name].server(), None
        self._is_trying = True
        why = unreachable(server)
        if not why:
            try:
                sink = self._made(is_online=True)
            except Exception as error:
                why = self._text(error)
        if threading.current_thread() is not self._thread:
            sys.exit()  # too late: another thread writes the points offline
        self._is_trying = False
        return sink, why

    def _made(self, *, is_online: bool) -> WandbSink | CometSink:
        return KINDS[self.name](
            self._section,
            self._folder,
            is_online=is_online,
            run_id=self._run_id,
            program=self._program,
            environ=os.environ,
        )

    def _text(self, error: BaseException) -> str:
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, SET)
        return printable(text, 400)

    def _warn(self, text: str) -> None:
        self._reply(kind="warning", name=self.name, text=text)


def _load(module: str) -> None:
    """Import a library, one at a time: NumPy, which both use, cannot be imported by two threads at once."""
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy")
    importlib.import_module(module)


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
