"""One communication thread per lane: carries started operations out in start order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.work import LONGEST_NAP_SECONDS, SHORTEST_NAP_SECONDS, Poll, Work

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)


class _Task:
    """A queued operation: first its group has to be complete, then it runs."""

    __slots__ = ("body", "comm", "deadline", "gate", "work")

    def __init__(self, comm: Comm, body: Callable[[], object], work: Work) -> None:
        self.comm, self.body, self.work = comm, body, work
        self.gate: Poll | None = None
        self.deadline = float("inf")

    def is_ready(self) -> bool:
        """Ask, without blocking, whether all ranks of the group have come to this operation."""
        if self.gate is None:
            self.gate = self.comm.arrive()
            if self.comm.timeout_seconds is not None:
                self.deadline = time.monotonic() + self.comm.timeout_seconds
        if self.gate():
            return True
        if time.monotonic() > self.deadline:
            msg = (
                f"started {self.work.verb} over {self.comm}: not all ranks came within {self.comm.timeout_seconds} s; "
                "a rank has ended or started its operations in another order"
            )
            raise CommError(msg)
        return False


class Progress:
    """The queue of a lane and the thread that empties it.

    Before an operation the thread naps until all ranks have reached it, because a transport that waits
    inside a collective burns the core that torch computes on. With `is_threaded` False (the MPI library
    lacks THREAD_MULTIPLE) operations run at once, inside `submit`.
    """

    def __init__(self, name: str, *, is_threaded: bool = True) -> None:
        self.name, self.is_threaded = name, is_threaded
        self._tasks: deque[_Task] = deque()
        self._watched: list[tuple[Poll, Work]] = []
        self._wake = threading.Condition()
        self._last: Work | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def submit(self, comm: Comm, body: Callable[[], object], verb: str, buffers: object = None) -> Work:
        """Queue `body` behind everything submitted before."""
        task = _Task(comm, body, Work(verb, buffers))
        if not self.is_threaded or self.is_own_thread():
            _carry_out(task)
            return task.work
        with self._wake:
            self._tasks.append(task)
            self._last = task.work
            self._ensure_thread()
            self._wake.notify()
        return task.work

    def watch(self, poll: Poll, verb: str, buffers: object = None) -> Work:
        """Ask `poll` beside the queue until it says yes."""
        work = Work(verb, buffers)
        if poll():
            work.finish()
            return work
        with self._wake:
            self._watched.append((poll, work))
            self._ensure_thread()
            self._wake.notify()
        return work

    def is_own_thread(self) -> bool:
        """True on the progress thread itself."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until everything submitted so far has ended; failures stay with their own handles."""
        last = self._last
        if last is not None and not self.is_own_thread():
            last.settle()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None and not self.is_own_thread():
            self._thread.join()
        self._thread = None

    def _ensure_thread(self) -> None:
        if self._is_closing:
            msg = f"lane {self.name!r} is closed; start nothing after Mesh.close()"
            raise CommError(msg)
        if self._thread is None:
            # A daemon, so that a rank that fails can leave while peers never answer.
            self._thread = threading.Thread(target=self._run, name=f"mpispeed-{self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        nap = SHORTEST_NAP_SECONDS
        while True:
            with self._wake:
                while not self._tasks and not self._watched and not self._is_closing:
                    self._wake.wait()
                if self._is_closing and not self._tasks and not self._watched:
                    return
                task = self._tasks[0] if self._tasks else None
            has_moved = self._poll_watched()
            if task is not None and self._step(task):
                with self._wake:
                    self._tasks.popleft()
                task = None  # this frame would keep its buffers alive while the lane is idle
                has_moved = True
            if has_moved:
                nap = SHORTEST_NAP_SECONDS
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, LONGEST_NAP_SECONDS)

    def _step(self, task: _Task) -> bool:
        """Carry `task` out if its group is complete; True when it has ended."""
        try:
            if not task.is_ready():
                return False
        except Exception as error:
            task.work.finish(error)
            return True
        _carry_out(task)
        return True

    def _poll_watched(self) -> bool:
        with self._wake:
            watched = list(self._watched)
        ended = []
        for poll, work in watched:
            try:
                if poll():
                    work.finish()
                    ended.append(work)
            except Exception as error:
                work.finish(error)
                ended.append(work)
        if ended:
            with self._wake:
                self._watched = [pair for pair in self._watched if pair[1] not in ended]
        return bool(ended)


def _carry_out(task: _Task) -> None:
    try:
        # Autograd's switch is per thread, and communication is never part of a graph.
        with torch.no_grad():
            task.body()
    except BaseException as error:
        log.warning("started %s over %s failed and is raised by its wait(): %s", task.work.verb, task.comm, error)
        task.work.finish(error)
    else:
        task.work.finish()
