"""Console: plain lines, the bar on a terminal, silence on other ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import count

from mpispeed.base.events import Bus, Event
from mpispeed.monitor import Console


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def half_seconds() -> Iterator[float]:
    return (tick / 2 for tick in count())


def run(console: Console, steps: int, skipped: bool = False) -> None:
    bus = Bus()
    console.attach(bus)
    for step in range(1, steps + 1):
        bus.announce(
            Event.STEP_KNOWN,
            global_step=step,
            samples=24 * step,
            loss=2.5,
            lr=1e-3,
            norm=1.0,
            loss_scale=8.0,
            skipped=skipped,
            seconds=0.5,
        )
    bus.announce(Event.EVAL_END, global_step=steps, samples=24 * steps, loss=1.75)
    bus.announce(Event.CLOSE)


def test_plain_lines() -> None:
    out, clock = io.StringIO(), half_seconds()
    run(Console(100, tokens_per_sample=128, steps_per_print=2, stream=out, rank=0, clock=lambda: next(clock)), 5)
    assert out.getvalue().splitlines() == [
        "step   2/100  loss 2.500  lr 1.00e-03  6.14k tokens/s  49 s left",
        "step   4/100  loss 2.500  lr 1.00e-03  6.14k tokens/s  48 s left",
        "step   5/100  validation loss 1.750",
    ]


def test_without_totals_samples_are_counted() -> None:
    out, clock = io.StringIO(), half_seconds()
    run(Console(steps_per_print=1, stream=out, rank=0, clock=lambda: next(clock)), 2, skipped=True)
    assert out.getvalue().splitlines()[:2] == [
        "step 1  loss 2.500  lr 1.00e-03  skipped (loss scale 8)",
        "step 2  loss 2.500  lr 1.00e-03  48 samples/s  skipped (loss scale 8)",
    ]


def test_other_ranks_are_silent() -> None:
    out, bus = io.StringIO(), Bus()
    Console(stream=out, rank=1).attach(bus)
    assert not any(bus.has(event) for event in Event)
    run(Console(steps_per_print=1, stream=out, rank=1), 3)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    run(Console(4, stream=out, rank=0), 4)
    text = out.getvalue()
    assert "4/4" in text
    assert "loss 2.500" in text
    assert "validation loss 1.750" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"


def test_a_load_restarts_the_clock() -> None:
    out, clock, bus = io.StringIO(), half_seconds(), Bus()
    Console(20, steps_per_print=1, stream=out, rank=0, clock=lambda: next(clock)).attach(bus)
    for step in (1, 11, 12):
        if step == 11:
            bus.announce(Event.LOAD_END, path="here", tag="t", seconds=1.0)
        bus.announce(
            Event.STEP_KNOWN, global_step=step, samples=step, loss=1.0, lr=0.1, loss_scale=1.0, skipped=False, seconds=1
        )
    assert out.getvalue().splitlines()[1].endswith("lr 1.00e-01")
    assert out.getvalue().splitlines()[2].endswith("2 samples/s  4 s left")
