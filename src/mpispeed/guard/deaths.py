"""Deaths of ranks, of this node and of others, until they are explained together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from mpispeed.base.ledger_file import State
from mpispeed.guard.bench import Settings
from mpispeed.guard.exits import Death, Groups, MemoryFacts, explain
from mpispeed.guard.report import Report, tail
from mpispeed.guard.tracker import Tracker

LINES = 5
IN_NOTHING_SECONDS = 0.01


class Deaths:
    """What is known of ranks that did not leave in good order."""

    def __init__(self, settings: Settings) -> None:
        self._host = settings.nodes[settings.node].host
        self.known: dict[int, Death] = {}
        self.end_the_job = True  # by themselves: ranks that fail or leave with an error take the others along
        self._is_to_say = False
        self._has_been_said = False
        self._new: list[dict[str, Any]] = []

    def add(self, tracker: Tracker, memory: Mapping[int, tuple[Groups, MemoryFacts]]) -> None:
        """A rank of this node has died."""
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
            # Of deaths that are seen at once, that of a rank which was in no operation came first: others wait in one.
            seen_seconds=time.time() - (0.0 if view.blocked_since() else IN_NOTHING_SECONDS),
        )
        self.known[tracker.rank] = death
        has_shown = bool(view.field("has_shown"))
        is_silent = state in (State.STARTING, State.RUNNING) or (
            state is not State.FAILED and status is not None and status.signal is not None
        )
        self._note(is_silent=is_silent, has_shown=has_shown)
        self._new.append({**asdict(death), "is_silent": is_silent, "has_shown": has_shown})

    def add_remote(self, deaths: Iterable[Mapping[str, Any]]) -> None:
        """Ranks of other nodes have died."""
        for packed in deaths:
            given = dict(packed)
            self._note(is_silent=bool(given.pop("is_silent")), has_shown=bool(given.pop("has_shown")))
            for name in ("memory_before", "memory_after"):
                given[name] = MemoryFacts(**given[name]) if given[name] else None
            self.known.setdefault(given["rank"], Death(**given))

    def take_new(self) -> list[dict[str, Any]]:
        """Deaths of this node that the others do not know yet."""
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
