"""The watchdog's agent in a rank: a thread that reports its place in the program, and aborts it on order."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from mpispeed.base import recorder_file as form
from mpispeed.base.recorder_words import Order, State
from mpispeed.mesh.recorder import FlightRecorder, caller

LOOK_SECONDS = 0.2
HANDED_SECONDS = 0.3
"""Pause between the rank's last words and the abort: the launcher drops what is still in the pipe."""


class Sentinel:
    """Looks at the header of the own recorder. `abort(code)` ends all ranks."""

    def __init__(self, recorder: FlightRecorder, abort: Callable[[int], object]) -> None:
        self._recorder, self._abort = recorder, abort
        self._thread = threading.Thread(target=self._run, name="mpispeed-sentinel", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _run(self) -> None:
        header = self._recorder.header
        while True:
            time.sleep(LOOK_SECONDS)
            if header["asked"][0] != header["answered"][0]:
                self._answer()
            if header["order"][0] == Order.END:
                self._end(int(header["order_code"][0]))

    def _answer(self) -> None:
        asked = int(self._recorder.header["asked"][0])
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self._recorder.write_words(form.STACK_AT, caller(frame) if frame is not None else "")
        self._recorder.header["answered"] = asked

    def _end(self, code: int) -> None:
        self._recorder.enter(State.FAILED, code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        time.sleep(HANDED_SECONDS)
        self._abort(code)
        os._exit(code)  # if the abort returns because MPI is gone already
