"""The console of a run: a progress bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from mpispeed.base.events import Bus, Event
from mpispeed.base.units import format_count, format_duration
from mpispeed.mesh.world import current

_WINDOW_STEPS = 50  # speed is the mean of so many steps


class Console:
    """Shows step, loss, speed, learning rate and the time left; rank 0 only.

    Args:
        total_steps: global steps of the whole run, for the bar and the time left.
        tokens_per_sample: shows tokens per second instead of samples per second.
        steps_per_print: a plain line is written after so many steps (a bar moves after each).
        stream: where to write; standard error unless given.
        rank: this process' rank; the rank in MPI unless given.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        tokens_per_sample: int | None = None,
        *,
        steps_per_print: int = 10,
        stream: TextIO | None = None,
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps, self.tokens_per_sample, self.steps_per_print = total_steps, tokens_per_sample, steps_per_print
        self._stream = stream or sys.stderr
        self._rank, self._clock = rank, clock
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW_STEPS + 1)  # seconds, step, samples
        self._bar: Progress | None = None

    def attach(self, bus: Bus) -> None:
        """Listen to steps, evaluations, loads and the end of the run."""
        world = current()
        rank = self._rank if self._rank is not None else (world.rank if world is not None else 0)
        if rank:
            return
        if self._stream.isatty():
            self._bar = _make_bar(self._stream)
            self._task = self._bar.add_task("training", total=self.total_steps, text="")
        bus.subscribe(Event.STEP_KNOWN, self._on_step)
        bus.subscribe(Event.EVAL_END, self._on_eval)
        bus.subscribe(Event.LOAD_END, self._on_load)
        bus.subscribe(Event.CLOSE, self._on_close)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step = event["global_step"]
        self._marks.append((self._clock(), step, event["samples"]))
        parts = [f"loss {event['loss']:.3f}", f"lr {event['lr']:.2e}", *self._speed(step)]
        if event["skipped"]:
            parts.append(f"skipped (loss scale {event['loss_scale']:g})")
        text = "  ".join(parts)
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=step, text=text)
            if step == self.total_steps:
                self._bar.stop()
        elif step % self.steps_per_print == 0 or step == self.total_steps:
            self._line(f"{self._name(step)}  {text}")

    def _on_eval(self, event: Mapping[str, Any]) -> None:
        self._line(f"{self._name(event['global_step'])}  validation loss {event['loss']:.3f}")

    def _on_load(self, event: Mapping[str, Any]) -> None:
        self._marks.clear()  # the step count jumps; speed is measured anew

    def _on_close(self, event: Mapping[str, Any]) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _name(self, step: int) -> str:
        if self.total_steps is None:
            return f"step {step}"
        return f"step {step:{len(str(self.total_steps))}d}/{self.total_steps}"

    def _speed(self, step: int) -> list[str]:
        """Throughput and time left, after two steps."""
        (start, first_step, first), (end, _, last) = self._marks[0], self._marks[-1]
        if end <= start:
            return []
        rate, unit = (last - first) / (end - start), "samples/s"
        if self.tokens_per_sample is not None:
            rate, unit = rate * self.tokens_per_sample, "tokens/s"
        found = [f"{format_count(rate)} {unit}"]
        if self.total_steps is not None and first_step < step < self.total_steps:
            left_seconds = (self.total_steps - step) * (end - start) / (step - first_step)
            found.append(f"{format_duration(left_seconds)} left")
        return found

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
            return
        self._stream.write(text + "\n")
        self._stream.flush()


def _make_bar(stream: TextIO) -> Progress:
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"))
    return Progress(*columns, console=rich.console.Console(file=stream))
