"""Passes, updates and their parts on the main thread of an engine, as something that begins and ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mpispeed.base.clock import Clock
from mpispeed.base.events import Bus, Event

PASSES = ("forward", "backward", "backward of weights")
STEP, UPDATE, RULE = "step", "update", "rule"
"""A global step; its end, which is made of parts; that of them which is called as a whole end."""


class Passes:
    """Calls `begin(name)` and `end(name, token)`, with what `begin` has returned, in turn and properly nested."""

    def __init__(self, begin: Callable[[str], Any], end: Callable[[str, Any], None]) -> None:
        self._call_begin, self._call_end = begin, end
        self._open: dict[str, Any] = {}  # tokens of what has begun, outermost first
        self._part = ""
        self._undo: list[Callable[[], None]] = []

    def attach(self, clock: Clock, bus: Bus) -> None:
        """Listen from now on, in the middle of a global step."""
        self._undo = [
            clock.listen(self._on_entering),
            bus.subscribe(Event.BATCH_START, lambda _: self._on_entering("forward")),
            bus.subscribe(Event.FORWARD_END, lambda _: self._end("forward")),
            bus.subscribe(Event.BACKWARD_END, lambda _: self._end_backward()),
            bus.subscribe(Event.STEP_END, self._on_step),
        ]
        self._begin(STEP)

    def detach(self) -> None:
        """Listen no more; what has not ended is left out."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._open.clear()

    def _on_entering(self, name: str) -> None:
        if name in PASSES:
            for left in [other for other in reversed(self._open) if other != STEP]:  # an exception has ended it
                self._end(left)
            self._begin(name)
            return
        if UPDATE not in self._open:
            self._begin(UPDATE)
        self._end(self._part)
        self._part = _words(name)
        self._begin(self._part)

    def _on_step(self, _: Mapping[str, Any]) -> None:
        for name in (self._part, UPDATE, STEP):
            self._end(name)
        self._begin(STEP)

    def _end_backward(self) -> None:
        for name in PASSES[1:]:
            self._end(name)

    def _begin(self, name: str) -> None:
        self._open[name] = self._call_begin(name)

    def _end(self, name: str) -> None:
        if name in self._open:
            self._call_end(name, self._open.pop(name))


def _words(name: str) -> str:
    """The name of a part of a step, which is that of a class, in words."""
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
    return RULE if words == UPDATE else words
