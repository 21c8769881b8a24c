"""Passes as things that begin and end in turn, whatever fails between."""

from __future__ import annotations

from mpispeed.base.clock import Clock
from mpispeed.base.events import Bus, Event
from mpispeed.engine.observe.passes import Passes


class Seen:
    """What began and ended, as ">name" and "<name"."""

    def __init__(self) -> None:
        self.clock, self.bus, self.found = Clock(), Bus(), list[str]()
        self.passes = Passes(self._begin, lambda name, token: self.found.append(f"<{token}"))
        self.passes.attach(self.clock, self.bus)

    def _begin(self, name: str) -> str:
        self.found.append(f">{name}")
        return name

    def enter(self, *names: str) -> None:
        assert self.clock.entering is not None
        for name in names:
            if name == "forward":
                self.bus.announce(Event.BATCH_START)
            else:
                self.clock.entering(name)


def test_a_step_of_two_passes_and_two_parts() -> None:
    seen = Seen()
    seen.enter("forward")
    seen.bus.announce(Event.FORWARD_END, seconds=1.0)
    seen.enter("backward")
    seen.bus.announce(Event.BACKWARD_END, seconds=1.0)
    seen.enter("MeasureNorm", "Update")
    seen.bus.announce(Event.STEP_END)
    seen.passes.detach()
    assert " ".join(seen.found) == (
        ">step >forward <forward >backward <backward "
        ">update >measure norm <measure norm >rule <rule <update <step >step"
    )
    assert seen.clock.entering is None
    assert not seen.bus.has(Event.STEP_END)


def test_what_an_exception_has_ended_ends_before_the_next_pass() -> None:
    seen = Seen()
    seen.enter("forward", "forward")
    seen.bus.announce(Event.FORWARD_END, seconds=1.0)
    seen.enter("Update", "forward")
    seen.bus.announce(Event.FORWARD_END, seconds=1.0)
    assert " ".join(seen.found) == (
        ">step >forward <forward >forward <forward >update >rule <rule <update >forward <forward"
    )
