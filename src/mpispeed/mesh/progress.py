"""One communication thread per lane: carries started operations out in start order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import ledger as ledgers
from mpispeed.mesh.gate import FAREWELL, Groups, Key, Label, Ready, Task, again
from mpispeed.mesh.work import LONGEST_NAP_SECONDS, SHORTEST_NAP_SECONDS, Poll, Work

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

LAST_GATES_SECONDS = 10.0
"""How long a lane that has been broken off waits for the gates that are still open."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """Where a lane stands: the gate it waits at, if any, and the gates it has posted in each of its groups.

    `is_moving` is True while it is at no gate and yet has something to do.
    """

    gate: tuple[Key, int] | None
    is_moving: bool
    posted: Mapping[Key, int]


class Progress:
    """The queue of a lane and the thread that empties it.

    Before an operation the thread naps until all ranks have reached it, because a transport that waits
    inside a collective burns the core that torch computes on. If they have come with different operations,
    nobody does anything and the lane is broken: this and everything later on it fails with the same error.
    With `is_threaded` False (the MPI library lacks THREAD_MULTIPLE) operations run at once, inside `submit`.
    """

    def __init__(self, name: str, *, number: int = 0, is_threaded: bool = True) -> None:
        """Args: `number` tells lanes of one name apart; the same on every rank."""
        self.name, self.number, self.is_threaded = name, number, is_threaded
        self.longest_nap_seconds = LONGEST_NAP_SECONDS
        self.is_watch = False  # carries what a Watch exchanges, which is no part of what is watched
        self._groups = Groups(name, number)
        self._tasks: deque[Task] = deque()
        self._watched: list[tuple[Poll, Work]] = []
        self._wake = threading.Condition()
        self._last: Work | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._broken: Exception | None = None
        self._owed: dict[Key, int] = {}

    def submit(
        self,
        comm: Comm,
        body: Callable[[], object],
        verb: str,
        buffers: object = None,
        label: Label = "",
        describe: Callable[[], str] | None = None,
        ready: Ready | None = None,
    ) -> Work:
        """Queue `body` behind everything submitted before.

        Collective over: `comm`, in the same order and with the same verb and label on every rank.

        Raises:
            AgreementError: ranks came with different operations; from here only without a thread, else from `wait`.
        """
        task = Task(comm, body, Work(verb, buffers), label, describe, ready)
        if not self.is_watch:
            task.note(self.number)
        if not self.is_threaded or self.is_own_thread():
            self._submit_now(task)
            return task.work
        with self._wake:
            if self._broken is not None:
                task.work.finish(again(self._broken))
                return task.work
            self._tasks.append(task)
            self._last = task.work
            self._ensure_thread()
            self._wake.notify()
        return task.work

    def watch(self, poll: Poll, verb: str, buffers: object = None, row: int = ledgers.NO_ROW) -> Work:
        """Ask `poll` beside the queue until it says yes."""
        work = Work(verb, buffers, row=row)
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

    def add_group(self, comm: Comm) -> None:
        """Make a group of this lane known. Collective over: the group, in the same order on every rank."""
        with self._wake:
            self._groups.add(comm)

    def drain(self) -> None:
        """Wait until everything submitted so far has ended; failures stay with their own handles.

        Raises:
            AgreementError: the lane is broken, so that a verb on it might wait for ever.
        """
        last = self._last
        if last is not None and not self.is_own_thread():
            last.settle()
        if self._broken is not None and not self.is_own_thread():
            raise again(self._broken)

    def close(self) -> None:
        """Finish what is queued and end the thread; a watch's round may be one that peers never join."""
        with self._wake:
            self._is_closing = True
            if self.is_watch and self._tasks:
                abandoned = CommError(f"lane {self.name!r} is closed")
                for task in self._tasks:
                    task.work.finish(abandoned)
                self._tasks.clear()
            self._wake.notify()
        if self._thread is not None and not self.is_own_thread():
            self._thread.join()
        self._thread = None
        self._groups.clear()

    def state(self, work: Work | None = None) -> tuple[LaneState, bool]:
        """Where the lane stands, and whether `work` is still in its queue."""
        with self._wake:
            head = self._tasks[0] if self._tasks else None
            number = head.number if head is not None else 0
            gate = (self._groups.add(head.comm), number) if head is not None and number else None
            is_moving = head is not None and (gate is None or self._broken is not None)
            is_queued = any(task.work is work for task in self._tasks)
            return LaneState(gate, is_moving, dict(self._groups.posted)), is_queued

    def break_off(self, error: CommError, furthest: Mapping[Key, int]) -> None:
        """Let everything queued fail with `error`.

        Gates up to `furthest`, where the ranks that are furthest stand, are posted before: a transport cannot
        take back those that peers wait at.

        Collective over: all ranks that have this lane.
        """
        with self._wake:
            if self._broken is not None or self._is_closing:
                return
            self._broken, self._owed = error, {k: n for k, n in furthest.items() if n > self._groups.posted.get(k, n)}
            if self._tasks or self._owed:
                self._ensure_thread()
            self._wake.notify()

    def _submit_now(self, task: Task) -> None:
        if self._broken is not None:
            raise again(self._broken)
        ledger = ledgers.current() if task.work.row != ledgers.NO_ROW else None
        if ledger is not None:
            ledger.waits_for(task.work.row)
        try:
            task.pass_now(self._groups)
        except Exception as error:
            self._broken = error
            task.work.finish(error)
            raise
        finally:
            if ledger is not None:
                ledger.waits_for(ledgers.NO_ROW)
        _carry_out(task)

    def _ensure_thread(self) -> None:
        if self._is_closing:
            msg = f"lane {self.name!r} is closed; start nothing after Mesh.close()"
            raise CommError(msg)
        if self._thread is None:
            # A daemon, so that a rank that fails can leave while peers never answer.
            self._thread = threading.Thread(target=self._run, name=f"mpispeed-{self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        ledgers.adopt_thread(self.number)
        try:
            self._carry_on()
        finally:
            ledgers.leave_thread()

    def _carry_on(self) -> None:
        """Carry out what is queued until the lane is closed."""
        nap = SHORTEST_NAP_SECONDS
        while True:
            with self._wake:
                while not (self._tasks or self._watched or self._owed or self._is_closing):
                    self._wake.wait()
                if self._is_closing and not (self._tasks or self._watched or self._owed):
                    return
                task = self._tasks[0] if self._tasks else None
                is_broken = self._broken is not None
            has_moved = self._poll_watched()
            if is_broken:
                task = None
                has_moved |= self._give_up()
            elif task is not None and self._step(task):
                with self._wake:
                    if self._tasks:
                        self._tasks.popleft()
                task = None  # this frame would keep its buffers alive while the lane is idle
                has_moved = True
            if has_moved:
                nap = SHORTEST_NAP_SECONDS
            else:
                time.sleep(nap)
                nap = min(nap * 1.5, self.longest_nap_seconds)

    def _step(self, task: Task) -> bool:
        """Carry `task` out if its group is complete; True when it has ended."""
        try:
            if not task.is_open(self._groups):
                return False
        except Exception as error:
            # All ranks raise what they agree on; one of them is enough to log it.
            is_told = getattr(error, "is_collective", False) and task.comm.rank > 0
            log.log(logging.DEBUG if is_told else logging.WARNING, "lane %r is broken: %s", self.name, error)
            with self._wake:
                self._broken = error
            task.work.finish(error)
            return True
        _carry_out(task)
        return True

    def _give_up(self) -> bool:
        """End a broken lane: post the gates that others wait at, then let everything queued fail; False if nothing is.

        Collective over: all ranks that have this lane, unless nobody waits at its gates.
        """
        with self._wake:
            error, tasks, owed = self._broken, list(self._tasks), self._owed
            self._tasks, self._owed = deque(), {}
        gates = [task for task in tasks[:1] if task.number]
        for key, furthest in owed.items():
            while self._groups.posted[key] < furthest:
                gates.append(self._farewell(key))
        for gate in gates:
            if not gate.settle(LAST_GATES_SECONDS):
                log.warning("lane %r: peers did not come to its last gates; the transport keeps them", self.name)
                break
        for task in tasks:
            task.work.finish(again(error) if error is not None else None)
        return bool(tasks or owed)

    def _farewell(self, key: Key) -> Task:
        gate = Task(self._groups.comm(key), lambda: None, Work("farewell"), "", None)
        gate.code = FAREWELL
        gate.post(self._groups)
        return gate

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


def _carry_out(task: Task) -> None:
    ledgers.started_here(task.site)
    try:
        # Autograd's switch is per thread, and communication is never part of a graph.
        with torch.no_grad():
            task.body()
    except BaseException as error:
        log.warning("started %s over %s failed and is raised by its wait(): %s", task.work.verb, task.comm, error)
        task.work.finish(error)
    else:
        task.work.finish()
    finally:
        ledgers.started_here("")
