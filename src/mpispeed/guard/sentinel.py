"""The watcher's hand inside of a rank: a thread that answers where the rank is, and ends it when it is told to."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from mpispeed.base import ledger_file as form
from mpispeed.base.ledger_file import Order, State
from mpispeed.mesh.ledger import Ledger, caller

LOOK_SECONDS = 0.2
HANDED_SECONDS = 0.3
"""Between the last words of the rank and the abort: the launcher drops what is still in the pipe."""


class Sentinel:
    """Looks at the header of the own ledger. `abort(code)` ends all ranks."""

    def __init__(self, ledger: Ledger, abort: Callable[[int], object]) -> None:
        self._ledger, self._abort = ledger, abort
        self._thread = threading.Thread(target=self._run, name="mpispeed-sentinel", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _run(self) -> None:
        header = self._ledger.header
        while True:
            time.sleep(LOOK_SECONDS)
            if header["asked"][0] != header["answered"][0]:
                self._answer()
            if header["order"][0] == Order.END:
                self._end(int(header["order_code"][0]))

    def _answer(self) -> None:
        asked = int(self._ledger.header["asked"][0])
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self._ledger.write_words(form.STACK_AT, caller(frame) if frame is not None else "")
        self._ledger.header["answered"] = asked

    def _end(self, code: int) -> None:
        self._ledger.enter(State.FAILED, code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        time.sleep(HANDED_SECONDS)
        self._abort(code)
        os._exit(code)  # where an abort returns because MPI is gone already
