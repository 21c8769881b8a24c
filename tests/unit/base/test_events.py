"""Listeners of a run: they only watch, and a broken one ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mpispeed.base.events import Bus, Event


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_listener_that_fails_is_dropped_and_the_others_are_told(
    caplog: pytest.LogCaptureFixture, *, ends_first: bool
) -> None:
    bus, told, ends = Bus(), list[Any](), list[Callable[[], None]]()

    def fails(_: Mapping[str, Any]) -> None:
        if ends_first:
            ends[0]()
        raise ValueError("no")

    ends.append(bus.subscribe(Event.CLOSE, fails))
    bus.subscribe(Event.CLOSE, told.append)
    for _ in range(2):
        bus.announce(Event.CLOSE)
    ends[0]()
    assert told == [{}, {}]
    assert caplog.text.count("a listener of close failed and is dropped") == 1
