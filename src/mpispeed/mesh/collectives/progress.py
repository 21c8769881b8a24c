"""Progress thread of a channel: carries out started operations in start order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.collectives.transport import Poll
from mpispeed.mesh.collectives.work import (
    FAREWELL,
    LONGEST_NAP_SECONDS,
    SHORTEST_NAP_SECONDS,
    Groups,
    Key,
    Label,
    Ready,
    Task,
    Work,
    again,
    nap_until,
)

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import Group

log = logging.getLogger(__name__)

SPIN_SECONDS = 20e-6
"""How long a thread that carries its own operation out asks for its peers without a pause."""

LAST_GATES_SECONDS = 10.0
"""How long a channel that has been broken off waits for the gates that are still open."""


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Position of a channel: the gate it waits at, if any, and the gates it has posted in each of its groups.

    `is_moving` is True while it has work and is at no gate.
    """

    gate: tuple[Key, int] | None
    is_moving: bool
    posted: Mapping[Key, int]


class Progress:
    """The queue of a channel and the thread that empties it.

    Before an operation the thread naps until all ranks have reached it, because a transport that waits
    inside a collective burns the core that torch computes on. If they have come with different operations, none runs
    and the channel is broken: this and everything later on it fails with the same error. With `is_threaded` False (the
    MPI library lacks THREAD_MULTIPLE) operations run at once, inside `submit`.
    """

    def __init__(self, name: str, *, number: int = 0, is_threaded: bool = True) -> None:
        """Args: `number` tells channels of one name apart; the same on every rank."""
        self.name, self.number, self.is_threaded = name, number, is_threaded
        self.longest_nap_seconds = LONGEST_NAP_SECONDS
        self.is_watch = False  # carries what a Watch exchanges, which is no part of what is watched
        self._groups = Groups(name, number)
        self._tasks: deque[Task] = deque()
        self._watched: list[tuple[Poll, Work]] = []
        self._wake = threading.Condition()
        self._last: Work | None = None
        self._thread: threading.Thread | None = None
        self._carrier: threading.Thread | None = None
        self._is_closing = False
        self._broken: Exception | None = None
        self._owed: dict[Key, int] = {}

    def submit(
        self,
        group: Group,
        body: Callable[[], object],
        verb: str,
        buffers: object = None,
        label: Label = "",
        describe: Callable[[], str] | None = None,
        ready: Ready | None = None,
    ) -> Work:
        """Queue `body` behind everything submitted before.

        Collective over: `group`, in the same order and with the same verb and label on every rank.

        Raises:
            AgreementError: ranks came with different operations; from here only without a thread, else from `wait`.
        """
        task = Task(group, body, Work(verb, buffers), label, describe, ready)
        self._enter(task)
        return task.work

    def carry(
        self, group: Group, body: Callable[[], object], verb: str, buffers: object = None, label: Label = ""
    ) -> Work:
        """Carry `body` out in its turn and return when it has ended; on this thread if the queue is empty.

        Peers may `submit` the same operation. Collective over: as `submit`.

        Raises:
            AgreementError: as from `submit`.
        """
        task = Task(group, body, Work(verb, buffers), label, None)
        try:
            self._enter(task, carries=True)
            if task.is_carried:
                self._carry_here(task)
        finally:
            self._hand_over(task)
        task.work.settle()
        return task.work

    def _enter(self, task: Task, *, carries: bool = False) -> None:
        """Queue a task, or end it where nothing is queued; this thread `carries` it if the queue is empty."""
        if not self.is_watch:
            task.note(self.number)
        if not self.is_threaded or self.is_own_thread():
            self._submit_now(task)
            return
        with self._wake:
            if self._broken is not None:
                task.work.finish(again(self._broken))
                return
            self._ensure_thread()  # first: what is queued without a thread would never end
            if carries and not self._tasks:
                task.is_carried, self._carrier = True, threading.current_thread()
            self._tasks.append(task)
            self._last = task.work
            self._wake.notify()

    def _hand_over(self, task: Task) -> None:
        """Let the thread of the channel end what is left of a task that this thread has carried."""
        if not task.is_carried:
            return
        with self._wake:
            task.is_carried, self._carrier = False, None
            if task.work.is_done() and self._tasks and self._tasks[0] is task:
                self._tasks.popleft()
            self._wake.notify()

    def _carry_here(self, task: Task) -> None:
        with _noting_wait(task):
            end = time.perf_counter() + SPIN_SECONDS
            while not (is_over := self._broken is not None or self._step(task)) and time.perf_counter() < end:
                pass
            if not is_over:
                nap_until(lambda: self._broken is not None or self._step(task))

    def _head(self) -> Task | None:
        """The next operation of the thread."""
        return self._tasks[0] if self._tasks and not self._tasks[0].is_carried else None

    def watch(self, poll: Poll, verb: str, buffers: object = None, row: int = recorders.NO_ROW) -> Work:
        """Poll `poll` beside the queue until it is true."""
        work = Work(verb, buffers, row=row)
        if poll():
            work.finish()
            return work
        with self._wake:
            try:
                self._ensure_thread()
            except BaseException:
                _ABANDONED.append((poll, buffers))
                raise
            self._watched.append((poll, work))
            self._wake.notify()
        return work

    def is_own_thread(self) -> bool:
        """True on the progress thread itself, and on a thread that carries its own operation out."""
        return threading.current_thread() in (self._thread, self._carrier)

    def add_group(self, group: Group) -> None:
        """Make a group of this channel known. Collective over: the group, in the same order on every rank."""
        with self._wake:
            self._groups.add(group)

    def drain(self) -> None:
        """Wait until everything submitted so far has ended; failures stay with their own handles.

        Raises:
            AgreementError: the channel is broken, so that a verb on it might wait for ever.
        """
        last = self._last
        if last is not None and not self.is_own_thread():
            last.settle()
        if self._broken is not None and not self.is_own_thread():
            raise again(self._broken)

    def close(self, limit_seconds: float | None = None) -> None:
        """Finish queued operations, within the limit if there is one, and end the thread; what is left fails."""
        has_ended = limit_seconds is None or nap_until(lambda: not (self._tasks or self._watched), limit_seconds)
        with self._wake:
            self._is_closing = True
            if self.is_watch or not has_ended:  # peers may never join a watch's round either
                _abandon(self._tasks, self._watched, CommError(f"channel {self.name!r} is closed"))
            self._wake.notify()
        if self._thread is not None and not self.is_own_thread():
            self._thread.join()
        self._thread = None
        self._groups.clear()

    def forget_messages(self, limit_seconds: float) -> int:
        """Wait so long for messages under way; those that have not ended fail. How many these are."""
        nap_until(lambda: not self._watched, limit_seconds)
        with self._wake:
            count = len(self._watched)
            _abandon(deque(), self._watched, CommError(f"channel {self.name!r} is closed, and nobody has answered"))
        return count

    def abandon(self) -> None:
        """Let everything fail that has not ended, also later, and the thread end by itself. Not blocking."""
        error = CommError(f"channel {self.name!r} was given up")
        with self._wake:
            self._is_closing, self._broken = True, self._broken or error
            _abandon(self._tasks, self._watched, error)
            self._wake.notify()

    def state(self, work: Work | None = None) -> tuple[ChannelState, bool]:
        """The position of the channel, and whether `work` is still in its queue."""
        with self._wake:
            head = self._tasks[0] if self._tasks else None
            number = head.number if head is not None else 0
            gate = (self._groups.add(head.group), number) if head is not None and number else None
            is_moving = head is not None and (gate is None or self._broken is not None)
            is_queued = any(task.work is work for task in self._tasks)
            return ChannelState(gate, is_moving, dict(self._groups.posted)), is_queued

    def break_off(self, error: CommError, furthest: Mapping[Key, int]) -> None:
        """Let everything queued fail with `error`.

        Gates up to `furthest`, the last that any rank has posted, are posted before: a transport cannot take back gates
        that peers wait at.

        Collective over: all ranks that have this channel.
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
        try:
            with _noting_wait(task):
                task.pass_now(self._groups)
        except BaseException as error:
            _ABANDONED.append(task.gate)
            if isinstance(error, Exception):
                self._broken = error
                task.work.finish(error)
            raise
        _carry_out(task)

    def _ensure_thread(self) -> None:
        if self._is_closing:
            msg = f"channel {self.name!r} is closed; start nothing after Mesh.close()"
            raise CommError(msg)
        if self._thread is None:
            # A daemon, so that a rank that fails can leave while peers never answer.
            thread = threading.Thread(target=_run, args=(self,), name=f"mpispeed-{self.name}", daemon=True)
            thread.start()
            self._thread = thread  # only now: a thread that could not be started is none

    def carry_on(self) -> None:
        """Carry out queued operations until the channel is closed."""
        nap = SHORTEST_NAP_SECONDS
        while True:
            with self._wake:
                while not (self._head() or self._watched or self._owed or self._is_closing):
                    self._wake.wait()
                if self._is_closing and not (self._tasks or self._watched or self._owed):
                    return
                task = self._head()
                is_broken = self._broken is not None
            has_moved = self._poll_watched()
            if is_broken:
                task = None
                has_moved |= self._give_up()
            elif task is not None and self._step(task):
                with self._wake:
                    if self._tasks:
                        self._tasks.popleft()
                task = None  # this frame would keep its buffers alive while the channel is idle
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
            is_told = getattr(error, "is_collective", False) and task.group.rank > 0
            log.log(logging.DEBUG if is_told else logging.WARNING, "channel %r is broken: %s", self.name, error)
            if not getattr(error, "is_collective", False):  # then the gate may still be open
                _ABANDONED.append(task.gate)
            with self._wake:
                self._broken = error
            task.work.finish(error)
            return True
        _carry_out(task)
        return True

    def _give_up(self) -> bool:
        """End a broken channel: post gates that others wait at, then fail the queue; False if it is empty.

        Collective over: all ranks that have this channel, unless nobody waits at its gates.
        """
        with self._wake:
            if self._tasks and self._tasks[0].is_carried:
                return False  # its thread sees that the channel is broken, and leaves it to this one
            error, tasks, owed = self._broken, list(self._tasks), self._owed
            self._tasks, self._owed = deque(), {}
        gates = [task for task in tasks[:1] if task.number]
        for key, furthest in owed.items():
            while self._groups.posted[key] < furthest:
                gates.append(self._farewell(key))
        _settle(gates, self.name)
        for task in tasks:
            task.work.finish(again(error) if error is not None else None)
        return bool(tasks or owed)

    def _farewell(self, key: Key) -> Task:
        gate = Task(self._groups.group(key), lambda: None, Work("farewell"), "", None)
        gate.code = FAREWELL
        gate.post(self._groups)
        return gate

    def _poll_watched(self) -> bool:
        with self._wake:
            watched = list(self._watched)
        ended = [pair for pair in watched if _has_ended(*pair)]
        if ended:
            with self._wake:
                self._watched = [pair for pair in self._watched if pair not in ended]
        return bool(ended)


_ABANDONED: list[object] = []
"""Buffers, requests and gates that the transport may still use, though nobody waits for them any more."""


def _run(channel: Progress) -> None:
    recorders.adopt_thread(channel.number)
    try:
        channel.carry_on()
    finally:
        recorders.leave_thread()


@contextmanager
def _noting_wait(task: Task) -> Iterator[None]:
    """Record that this thread waits for the task."""
    recorder = recorders.current() if task.work.row != recorders.NO_ROW else None
    if recorder is not None:
        recorder.waits_for(task.work.row)
    try:
        yield
    finally:
        if recorder is not None:
            recorder.waits_for(recorders.NO_ROW)


def _settle(gates: Sequence[Task], name: str) -> None:
    """Wait for the last gates of a channel; those that stay open keep their buffers."""
    for number, gate in enumerate(gates):
        if not gate.settle(LAST_GATES_SECONDS):
            _ABANDONED.extend(left.gate for left in gates[number:])
            log.warning("channel %r: peers did not come to its last gates; the transport keeps them", name)
            break


def _abandon(tasks: deque[Task], watched: list[tuple[Poll, Work]], error: CommError) -> None:
    """Let everything that is left fail with `error`."""
    _ABANDONED.extend((*tasks, *((poll, work.buffers) for poll, work in watched)))
    for work in [*(task.work for task in tasks), *(work for _, work in watched)]:
        work.finish(error)
    tasks.clear()
    watched.clear()


def _has_ended(poll: Poll, work: Work) -> bool:
    try:
        if not poll():
            return False
    except Exception as error:
        work.finish(error)
    else:
        work.finish()
    return True


def _carry_out(task: Task) -> None:
    recorders.started_here(task.site)
    try:
        # Autograd's switches are per thread, and communication is never part of a graph.
        with torch.inference_mode(task.is_inference), torch.no_grad():
            task.body()
    except BaseException as error:
        log.warning("started %s over %s failed and is raised by its wait(): %s", task.work.verb, task.group, error)
        task.work.finish(error)
    else:
        task.work.finish()
    finally:
        recorders.started_here("")


def is_broken(channel: Progress) -> bool:
    """True if all that is started there fails."""
    return channel._broken is not None
