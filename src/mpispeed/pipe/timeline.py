"""Timeline of a schedule for given times of passes, without communication; and the formulas for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from mpispeed.base.errors import ConfigError, ScheduleError
from mpispeed.base.registry import Registry
from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule_base import PipeSchedule

#: a time in any unit; a float is taken as the decimal number it prints as
Time = int | float | Fraction


class Span(NamedTuple):
    """A pass in time; `start` and `end` count units of the timeline."""

    start: int
    end: int
    kind: type[do.BufferOpInstruction]
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Timeline:
    """The passes of each stage in time.

    Attributes:
        unit: the longest time of which all passes are multiples.
        stages: the passes of each stage in their order.
        chunks: virtual stages of each stage.
    """

    unit: Fraction
    stages: tuple[tuple[Span, ...], ...]
    chunks: int

    @property
    def makespan(self) -> Fraction:
        """Time from the first pass to the end of the last, over all stages."""
        return self.columns * self.unit

    @property
    def columns(self) -> int:
        """The makespan in units."""
        return max((span.end for spans in self.stages for span in spans), default=0)

    @property
    def bubbles(self) -> tuple[Fraction, ...]:
        """For each stage, the time in which it does nothing."""
        return tuple((self.columns - sum(span.end - span.start for span in spans)) * self.unit for spans in self.stages)

    @property
    def bubble_fraction(self) -> Fraction:
        """The part of all stages' time in which nothing is done."""
        return sum(self.bubbles, Fraction(0)) / (self.makespan * len(self.stages))


def times(
    schedules: Sequence[PipeSchedule],
    forward: Time = 1,
    backward_input: Time = 1,
    backward_weight: Time = 1,
) -> Timeline:
    """Simulate the schedules of all stages in time. They should have passed `check`.

    Args:
        schedules: one per stage, in order.
        forward: time of a forward pass of one micro-batch through a whole stage; each of v chunks takes 1/v of it.
        backward_input: of the gradient of the stage's inputs.
        backward_weight: of the gradients of its weights. A backward pass that is not split takes both.

    Raises:
        ConfigError: a time is negative or no number, or all are zero.
        ScheduleError: the schedules wait for each other for ever.
    """
    unit, units = _in_units(schedules[0].num_chunks, forward, backward_input, backward_weight)
    sent: dict[tuple[bool, int], deque[int]] = {}
    stages = [_Clock(schedule, units, sent) for schedule in schedules]
    while any([stage.run() for stage in stages]):
        pass
    stuck = [str(place) for place, stage in enumerate(stages) if stage.todo]
    if stuck:
        msg = f"these stages wait for ever: {', '.join(stuck)}; `check` says for what"
        raise ScheduleError(msg)
    return Timeline(unit, tuple(tuple(stage.spans) for stage in stages), schedules[0].num_chunks)


def exact(time: Time) -> Fraction:
    """A time as a fraction.

    Raises:
        ConfigError: it is negative, or no finite number.
    """
    try:
        value = Fraction(str(time)) if isinstance(time, float) else Fraction(time)
    except (ValueError, OverflowError, TypeError) as error:
        msg = f"the time of a pass is {time!r}; expected a finite number"
        raise ConfigError(msg) from error
    if value < 0:
        msg = f"the time of a pass is {time!r}; expected at least 0"
        raise ConfigError(msg)
    return value


def _in_units(chunks: int, *given: Time) -> tuple[Fraction, dict[type, int]]:
    """The unit, and the duration of each pass of a chunk in it."""
    parts = [exact(time) / chunks for time in given]
    scale = math.lcm(*(part.denominator for part in parts))
    step = math.gcd(*(int(part * scale) for part in parts))
    if step == 0:
        msg = "all passes take no time; expected a time above 0 for one of them"
        raise ConfigError(msg)
    forward, inputs, weights = (int(part * scale) // step for part in parts)
    return Fraction(step, scale), {
        do.ForwardPass: forward,
        do.BackwardPass: inputs + weights,
        do.BackwardInput: inputs,
        do.BackwardWeight: weights,
    }


class _Clock:
    """A stage and its current time."""

    def __init__(
        self, schedule: PipeSchedule, units: dict[type, int], sent: dict[tuple[bool, int], deque[int]]
    ) -> None:
        self.todo = deque(one for step in schedule.steps() for one in step)
        self.spans: list[Span] = []
        self._schedule = schedule
        self._units = units
        self._sent = sent
        self._now = 0
        self._passed: dict[tuple[type, int], int] = {}

    def run(self) -> bool:
        """Run until a message is missing; True if anything ran."""
        before = len(self.todo)
        while self.todo:
            one = self.todo[0]
            if isinstance(one, do.BufferOpInstruction) and not self._do(one):
                break
            self.todo.popleft()
        return len(self.todo) < before

    def _do(self, one: do.BufferOpInstruction) -> bool:
        here = self._schedule.virtual_stage(one.chunk)
        if isinstance(one, do.SendActivation | do.SendGrad):
            self._sent.setdefault((isinstance(one, do.SendActivation), here), deque()).append(self._now)
        elif isinstance(one, do.RecvActivation | do.RecvGrad):
            is_activation = isinstance(one, do.RecvActivation)
            arrived = self._sent.get((is_activation, here - 1 if is_activation else here + 1))
            if not arrived:
                return False
            self._now = max(self._now, arrived.popleft())
        elif type(one) in self._units:
            end = self._now + self._units[type(one)]
            self.spans.append(Span(self._now, end, type(one), one.chunk, self._batch(one)))
            self._now = end
        return True

    def _batch(self, one: do.BufferOpInstruction) -> int:
        """The micro-batch an instruction names; else the passes of a kind and chunk are counted."""
        count = self._passed.get((type(one), one.chunk), 0)
        self._passed[type(one), one.chunk] = count + 1
        return count if one.micro_batch is None else one.micro_batch


# -- formulas ----------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Parameters of the bubble, beside the schedule."""

    micro_batches: int
    stages: int
    chunks: int
    forward: Fraction
    backward_input: Fraction
    backward_weight: Fraction


_BUBBLES: Registry[Callable[[Shape], Fraction | None]] = Registry("pipeline schedule", ignore_case=True)


def expected_bubble(
    name: str,
    micro_batches: int,
    stages: int,
    chunks: int = 1,
    forward: Time = 1,
    backward_input: Time = 1,
    backward_weight: Time = 1,
) -> Fraction | None:
    """The idle time of each of equal stages by the closed form of the schedule; None where it has none.

    Sources: GPipe (arXiv 1811.06965), interleaved 1F1B (arXiv 2104.04473), ZB-H1 (arXiv 2401.10241).

    Args:
        name: a key of `schedule.SCHEDULES`.
        micro_batches: micro-batches of a batch.
        stages: ranks of the pipeline.
        chunks: virtual stages of each rank.
        forward: times as for `times`.
        backward_input: as there.
        backward_weight: as there.

    Raises:
        ConfigError: the name is unknown, or a time is negative or no number.
    """
    formula = _BUBBLES[name]
    return formula(Shape(micro_batches, stages, chunks, exact(forward), exact(backward_input), exact(backward_weight)))


def _round(shape: Shape) -> Fraction:
    """Time in which a micro-batch passes all other stages, forth and back."""
    return (shape.stages - 1) * (shape.forward + shape.backward_input + shape.backward_weight)


@_BUBBLES.register("gpipe")
@_BUBBLES.register("1f1b")
def _one_by_one(shape: Shape) -> Fraction | None:
    return _round(shape)


@_BUBBLES.register("interleaved")
def _interleaved(shape: Shape) -> Fraction | None:
    return None if shape.micro_batches % shape.stages else _round(shape) / shape.chunks


@_BUBBLES.register("zb-h1")
def _zero_bubble(shape: Shape) -> Fraction | None:
    if shape.stages == 1:
        return Fraction(0)
    # A weight pass that is longer than one of the passes it stands between holds the other stages up.
    if shape.micro_batches < shape.stages or shape.backward_weight > min(shape.forward, shape.backward_input):
        return None
    return (shape.stages - 1) * (shape.forward + shape.backward_input - shape.backward_weight)
