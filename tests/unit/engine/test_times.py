"""What belongs to which time, by a clock that a test turns."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mpispeed.base.clock import Clock, Stopwatch
from mpispeed.base.events import Bus, Event
from mpispeed.engine.observe.times import Times
from mpispeed.engine.step import StepContext

CTX = StepContext(1, 1.0, 8)


class Turned(Clock):
    """Stands still until it is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.now = lambda: self.seconds

    def work(self, seconds: float) -> None:
        self.seconds += seconds


class Run:
    """An engine's events, and sums as a store of gradients measures them."""

    def __init__(self, *, has_micro_steps: bool = True) -> None:
        self.bus, self.clock, self.told = Bus(), Turned(), list[dict[str, float]]()
        self.times = Times(self.bus, self.clock, has_micro_steps=has_micro_steps)
        self.times.attach()
        self.bus.subscribe(Event.TIMES, lambda event: self.told.append(event["series"]))

    def sum(self, seconds: float) -> None:
        with self.times.sums:
            self.clock.work(seconds)

    def passes(self, forward: float, backward: float, sums: float = 0.0, *, is_training: bool = True) -> None:
        self.bus.announce(Event.BATCH_START, micro_step=0, global_step=0, is_training=is_training)
        self.bus.announce(Event.FORWARD_END, seconds=forward)
        if is_training:
            self.sum(sums)
            self.bus.announce(Event.BACKWARD_END, seconds=backward)

    def step(self, seconds: float, sums: float = 0.0) -> None:
        self.times.begin_step(CTX)
        self.sum(sums)
        self.bus.announce(Event.STEP_END, global_step=1, samples=8, update_seconds=seconds)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    logger, found = logging.getLogger("mpispeed.engine.observe.times"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO
    yield found
    logger.level = before
    logger.removeHandler(handler)


def test_sums_belong_to_the_backward_pass_wherever_they_are_waited_for(lines: list[str]) -> None:
    run = Run()
    run.passes(0.25, 1.0, sums=0.5)
    run.times.end_micro_step()
    run.passes(0.5, 2.0, sums=0.25)
    run.sum(4.0)  # engine.allreduce_gradients()
    run.step(16.0, sums=8.0)
    run.times.end_micro_step()
    assert run.told == [
        {"forward": 0.75, "backward": 15.0, "backward_inner": 2.25, "backward_allreduce": 12.75, "step": 8.0}
    ]
    assert lines == [
        "time (ms) | fwd_microstep: 250.00 | bwd_microstep: 1000.00 | bwd_inner_microstep: 500.00 | "
        "bwd_allreduce_microstep: 500.00 | step_microstep: 0.00",
        "time (ms) | fwd_microstep: 500.00 | bwd_microstep: 14000.00 | bwd_inner_microstep: 1750.00 | "
        "bwd_allreduce_microstep: 12250.00 | step_microstep: 8000.00",
        "time (ms) | fwd: 750.00 | bwd: 15000.00 | bwd_inner: 2250.00 | bwd_allreduce: 12750.00 | step: 8000.00",
    ]


def test_a_step_begins_with_nothing_of_the_one_before() -> None:
    run = Run(has_micro_steps=False)
    for _ in range(2):
        run.passes(9.0, 0.0, is_training=False)
        run.passes(0.25, 1.0)
        run.step(2.0)
    assert run.told[0] == run.told[1]
    assert run.told[0]["forward"] == 0.25


def test_laps_of_a_stopwatch_are_given_once() -> None:
    clock = Turned()
    watch = Stopwatch(clock)
    for seconds in (0.5, 0.25):
        with watch:
            clock.work(seconds)
        clock.work(1.0)
    assert [float(lap) for lap in watch.take()] == [0.5, 0.25]
    assert watch.take() == []


def test_all_listeners_hear_what_begins() -> None:
    clock, heard = Clock(), list[tuple[str, str]]()
    clock.listen(lambda name: heard.append(("a", name)))
    clock.listen(lambda name: heard.append(("b", name)))
    assert clock.entering is not None
    clock.entering("forward")
    assert heard == [("a", "forward"), ("b", "forward")]
