"""Follows the recorder of one rank: its progress in each group, its present operation, and its end."""

from __future__ import annotations

import time

from mpispeed.base.recorder_words import MAIN, OTHER, Kind, State
from mpispeed.watchdog.process import ProcessWatch, Status
from mpispeed.watchdog.recorder_reader import Operation, RecorderView
from mpispeed.watchdog.wait_graph import Doing, RankState

ASK_SECONDS = 3.0
"""Least time between two requests for a rank's stack."""


class Tracker:
    """One rank of this node."""

    def __init__(self, view: RecorderView, handle: int | None = None) -> None:
        """Follow the rank of a recorder; `handle` is a pidfd of its process."""
        self.view, self.rank = view, view.rank
        self.process = ProcessWatch(view.pid, handle=handle)
        self.status: Status | None = None
        self.ended_at = 0.0
        self.last_site = ""
        self._counts = RankState(self.rank)
        self._queued: dict[int, Operation] = {}
        self._asked_at = 0.0
        self._said = ""
        self._shown = 0
        self._last_begin = 0.0
        self.epoch = 0.0  # waits count from here at the earliest

    @property
    def has_ended(self) -> bool:
        """True if the process is gone."""
        return self.status is not None

    @property
    def has_died(self) -> bool:
        """True if the process is gone and did not leave in good order."""
        if self.status is None:
            return False
        state, code = self.view.state, int(self.view.field("exit_code"))
        has_left = state is State.LEFT or (state is State.LEAVING and code == 0)  # LEFT: together with all others
        return not (has_left and (self.status.exit_code == code or not self.status.is_known))

    def poll(self) -> bool:
        """Look whether the process has ended; True once, when it has."""
        if self.status is not None:
            return False
        self.status = self.process.poll()
        self.ended_at = time.monotonic()
        return self.status is not None

    def news(self) -> list[Operation]:
        """Operations that have begun since the last call, in their order."""
        shown = self.view.field("shown")
        fresh = self.view.news()
        self._shown = shown
        counts = self._counts
        for operation in fresh:
            key, message = operation.comm, (operation.comm, operation.peer, operation.tag)
            if operation.kind is Kind.COLLECTIVE:
                counts.entered[key] = max(operation.seq, counts.entered.get(key, 0))
            elif operation.kind is Kind.GATE:
                counts.submitted[key] = max(operation.seq, counts.submitted.get(key, 0))
                self._queued[operation.row] = operation
            elif operation.kind is Kind.SEND:
                counts.sends[message] = max(operation.seq, counts.sends.get(message, 0))
            else:
                counts.recvs[message] = max(operation.seq, counts.recvs.get(message, 0))
            self.last_site = operation.site or self.last_site
            self._last_begin = max(operation.begin, self._last_begin)
        return fresh

    def answer(self) -> None:
        """Tell the rank that its state has been looked at and judged."""
        self.view.set_looked(self._shown)

    def state(self, *, asks: bool) -> RankState:
        """Return the known state; `asks`: a rank in no operation is asked for its place. Call `news` before."""
        now, counts = time.monotonic(), self._counts
        under_way = self.view.under_way()
        self._count_gates(under_way)
        rows = {operation.row: operation for operation in under_way}
        blocking = [
            self._doing(operation, now)
            for operation in under_way
            if operation.thread == MAIN and operation.kind is not Kind.GATE and not operation.is_posted
        ]
        wait = self.view.wait()
        if wait is not None and wait[0] in rows:
            blocking.append(self._doing(rows[wait[0]], now, wait[1]))
        future = self.view.future()
        if not blocking and future is not None and future[0] in rows:
            blocking.append(self._doing(rows[future[0]], now, future[1], is_seen=False))
        lanes: dict[int, list[Doing]] = {}
        for operation in under_way:
            if operation.thread not in (MAIN, OTHER) and (
                operation.kind in (Kind.GATE, Kind.COLLECTIVE) or not operation.is_posted
            ):
                lanes.setdefault(operation.thread, []).append(self._doing(operation, now))
        return RankState(
            self.rank, self.gone(), blocking, lanes, counts.entered, counts.submitted, counts.gates, counts.sends,
            counts.recvs, self._place(now, is_free=not blocking) if asks else "", self.last_site,
            is_dead=self.has_ended, is_ending=self._is_ending(), is_open=bool(self.view.field("is_open")),
            idle_seconds=now - max(self._last_begin, float(self.view.field("step_at")), self.epoch),
        )  # fmt: skip

    def _is_ending(self) -> bool:
        """True if the rank has failed or left with an error code, and takes the others along within seconds."""
        state = self.view.state
        return state is State.FAILED or (state is State.LEAVING and int(self.view.field("exit_code")) != 0)

    def gone(self) -> str:
        """The reason why this rank will do nothing any more, or ""."""
        state, code = self.view.state, int(self.view.field("exit_code"))
        if state in (State.LEAVING, State.LEFT):
            return f"has left the program (exit code {code})" if code else "has left the program"
        if state is State.FAILED:
            return "has failed"
        return f"has died ({self.status})" if self.status is not None else ""

    def _count_gates(self, under_way: list[Operation]) -> None:
        """Count gates that are posted or behind this rank: finished ones were posted."""
        waiting = {operation.row: operation for operation in under_way if operation.kind is Kind.GATE}
        for row, operation in list(self._queued.items()):
            now = waiting.get(row)
            if now is None or now.is_posted:
                self._counts.gates[operation.comm] = max(operation.seq, self._counts.gates.get(operation.comm, 0))
                del self._queued[row]

    def _doing(self, operation: Operation, now: float, since: float | None = None, *, is_seen: bool = True) -> Doing:
        group = self.view.groups.get(operation.comm)
        name = group.name if group is not None else ""
        return Doing(
            operation.comm, int(operation.kind), operation.seq, operation.peer, operation.tag, operation.thread,
            operation.is_posted, now - max(operation.begin, since or 0.0, self.epoch),
            operation.text(name), operation.site, name, is_seen,
        )  # fmt: skip

    def _place(self, now: float, *, is_free: bool) -> str:
        """The innermost frame of the user's program on the main thread, as the rank has last said."""
        if not is_free or self.has_ended:
            self._said = ""
            return ""
        self._said = self.view.stack().strip() or self._said
        if now - self._asked_at > ASK_SECONDS:
            self._asked_at = now
            self.view.ask_for_stack()
        return self._said
