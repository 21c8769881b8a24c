"""Deaths of ranks, of this node and of others, until they are explained together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mpispeed.base.recorder_words import State
from mpispeed.watchdog.exits import Death, Groups, MemoryFacts, explain
from mpispeed.watchdog.node_ranks import Settings
from mpispeed.watchdog.report import Report, tail
from mpispeed.watchdog.tracker import Tracker

LINES = 5
IN_NOTHING_SECONDS = 0.01


class Deaths:
    """Deaths of ranks that did not leave in good order, as far as they are known."""

    def __init__(self, settings: Settings) -> None:
        self._host = settings.nodes[settings.node].host
        self.known: dict[int, Death] = {}
        self.end_the_job = True  # True if the deaths do so by themselves: failed ranks take the others along
        self._is_to_say = False
        self._has_been_said = False
        self._new: list[dict[str, Any]] = []

    def add(self, trackers: Iterable[Tracker], memory: Mapping[int, tuple[Groups, MemoryFacts]]) -> None:
        """Add ranks of this node that have died since the last look, all with one time, however long this takes."""
        seen_seconds = time.time()
        for tracker in trackers:
            self._add(tracker, memory, seen_seconds)

    def _add(self, tracker: Tracker, memory: Mapping[int, tuple[Groups, MemoryFacts]], seen_seconds: float) -> None:
        view, status, now = tracker.view, tracker.status, time.monotonic()
        before = memory.get(tracker.rank)
        code = status.exit_code if status is not None else None
        state = view.state
        if code is None and state in (State.LEAVING, State.LEFT):
            code = int(view.field("exit_code"))
        death = Death(
            rank=tracker.rank,
            host=self._host,
            pid=view.pid,
            exit_code=code,
            signal=status.signal if status is not None else None,
            last_words=view.words() or None,
            last_lines=tuple(tail(view.last(LINES), view.groups, now)),
            peak_bytes=before[1].peak_bytes if before else None,
            memory_before=before[1] if before else None,
            memory_after=before[0].facts(view.pid) if before else None,
            had_left=state in (State.LEAVING, State.LEFT),
            # Of deaths seen at once, that of a rank in no operation came first: the others were waiting in one.
            seen_seconds=seen_seconds - (0.0 if view.blocked_since() else IN_NOTHING_SECONDS),
        )
        self.known[tracker.rank] = death
        has_shown = bool(view.field("has_shown"))
        by_signal = status is not None and status.signal is not None
        # Launchers kill what has not left yet when the first process ends with an error code.
        is_taken_along = state is State.LEFT and view.field("exit_code") != 0
        is_silent = state in (State.STARTING, State.RUNNING) or (
            by_signal and state is not State.FAILED and not is_taken_along
        )
        self._note(is_silent=is_silent, has_shown=has_shown)
        self._new.append({**asdict(death), "is_silent": is_silent, "has_shown": has_shown})

    def add_remote(self, deaths: Iterable[Mapping[str, Any]]) -> None:
        """Add deaths of ranks of other nodes."""
        for packed in deaths:
            given = dict(packed)
            self._note(is_silent=bool(given.pop("is_silent")), has_shown=bool(given.pop("has_shown")))
            for name in ("memory_before", "memory_after"):
                given[name] = MemoryFacts(**given[name]) if given[name] else None
            self.known.setdefault(given["rank"], Death(**given))

    def take_new(self) -> list[dict[str, Any]]:
        """Return the deaths of this node that have not been sent to the others."""
        new, self._new = self._new, []
        return new

    def report(self) -> tuple[Report, bool]:
        """The explanation, and whether it has to be said: not if a rank has shown its own error, or chose its code."""
        found = explain(self.known.values())
        facts = {
            "reason": found.reason,
            "rank": found.rank,
            "cure": found.cure,
            "consequences": list(found.consequences),
        }
        facts["ranks"] = [] if found.rank is None else [found.rank]
        return Report(f"death: {found.kind}", found.text, facts), self._is_to_say and not self._has_been_said

    def _note(self, *, is_silent: bool, has_shown: bool) -> None:
        self._is_to_say |= is_silent
        self._has_been_said |= has_shown
        self.end_the_job &= not is_silent
