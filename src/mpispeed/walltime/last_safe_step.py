"""The last safe step: durations of saves and steps, and if another step still fits before the end of the job."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from mpispeed.base.errors import ConfigError
from mpispeed.base.units import parse_duration
from mpispeed.walltime.job_end import LIMIT

FIRST_SAVE_SECONDS = 5.0
FIRST_SAVE_BYTES_PER_SECOND = 200e6
"""A guess for the first save, on the low side; afterwards the time is known."""

KEPT_SAVES, KEPT_STEPS = 10, 50

PAUSE_SECONDS, PAUSE_FACTOR, STEPS_TO_JUDGE = 10.0, 10.0, 5
"""A step so much longer than others had something else before it, an evaluation that the engine was not told of."""

CHECK_SECONDS = 1.0
"""Interval in which ranks agree on saving or stopping, where steps are shorter."""

MOST_STEPS = 32
"""Most steps between two agreements: steps may become slower at any time."""


class RunEnded(SystemExit):
    """The run was saved and ends here, on all ranks; if nobody catches this, the program ends too.

    Attributes:
        tag: of the checkpoint.
        step: its global step.
        reason: why the run ends.
        loss: of that step.
    """

    def __init__(self, code: int, *, tag: str, step: int, reason: str, loss: float) -> None:
        super().__init__(code)
        self.tag, self.step, self.reason, self.loss = tag, step, reason, loss

    def __str__(self) -> str:
        return f"the run ends at step {self.step} ({self.reason}) and is saved as {self.tag}"


def choose_limit(configured: str | float | None, exported: str | None) -> float | None:
    """Seconds that the job may take: what the environment says, else the configuration; None if neither does.

    Raises:
        ConfigError: the variable is no duration.
    """
    if exported:
        try:
            return parse_duration(exported)
        except ValueError as error:
            msg = f"{LIMIT}={exported!r} (of the environment, or of mpispeed run --walltime): {error}"
            raise ConfigError(msg) from None
    return None if configured is None else parse_duration(configured)


class SaveClock:
    """Upper estimate of the time of a save to the run's own folder, from the last ones."""

    def __init__(self, size_bytes: float, known_seconds: float = 0.0) -> None:
        """Args: bytes that a save writes; what a save took in the job before, 0 if nobody knows."""
        guess = FIRST_SAVE_SECONDS + size_bytes / FIRST_SAVE_BYTES_PER_SECOND
        self._first, self._knows_first = known_seconds or guess, bool(known_seconds)
        self._seen: deque[float] = deque(maxlen=KEPT_SAVES)

    @property
    def is_guess(self) -> bool:
        """True if no save was seen, in this job or the one before."""
        return not self._seen and not self._knows_first

    @property
    def expected_seconds(self) -> float:
        """Upper estimate for the next save."""
        return max(self._seen, default=self._first)

    def note(self, seconds: float, *, is_own: bool = True) -> None:
        """Record the time of a save; one to another folder only shows if the first guess was too low."""
        if is_own:
            self._seen.append(seconds)
        else:
            self._first = max(self._first, seconds)


class StepClock:
    """Times from one end of a step to the next.

    Pauses now and then between two steps, an evaluation or a save by the script, are kept apart: one may come again
    once as many steps have passed as ever lay between two of them, and take as long as the longest one of this job.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=KEPT_STEPS)
        self._pause_seconds = 0.0
        self._first_step: int | None = None
        self._paused_at: int | None = None
        self._first_period = self._period = math.inf  # steps to the first pause of this job, and between two
        self._was_slow = False

    def note(self, step: int, seconds: float, *, has_pause: bool) -> None:
        """Step `step` ended so long after the one before; `has_pause`: something else than a step came between."""
        first = self._first_step = step if self._first_step is None else self._first_step
        is_slow = self._is_slow(seconds)
        has_pause = has_pause or (is_slow and not self._was_slow)  # one after another: steps have become slower
        self._was_slow = is_slow
        if not has_pause or not self._seen:
            self._seen.append(seconds)
        if not has_pause:
            return
        self._pause_seconds = max(self._pause_seconds, seconds)
        if self._paused_at is None:
            self._first_period = step - first + 1
        else:
            self._period = min(self._period, max(1, step - self._paused_at))
        self._paused_at = step

    def _is_slow(self, seconds: float) -> bool:
        enough = len(self._seen) >= STEPS_TO_JUDGE
        return enough and seconds > max(PAUSE_SECONDS, PAUSE_FACTOR * median(self._seen))

    @property
    def typical_seconds(self) -> float:
        """Typical seconds of a step."""
        return sum(self._seen) / len(self._seen) if self._seen else 0.0

    @property
    def longest_seconds(self) -> float:
        """The longest of the last steps, without pauses."""
        return max(self._seen, default=0.0)

    def steps_to_pause(self, step: int) -> float:
        """Steps that will end before the next pause may come, after `step`; infinite if there was none yet."""
        if self._paused_at is None:
            return math.inf
        period = self._first_period if math.isinf(self._period) else self._period
        return max(0.0, self._paused_at + period - 1 - step)

    def ahead_seconds(self, step: int) -> float:
        """The longest time until the step after `step` may end."""
        pause = self._pause_seconds if self.steps_to_pause(step) < 1 else 0.0
        return max(self.longest_seconds, pause)


@dataclass(frozen=True, slots=True)
class Margin:
    """Time to leave unused: seconds, and a multiple of the time of a save."""

    seconds: float
    factor: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """True if this is the last safe step; else the number of steps until the next judgement."""

    is_last: bool
    next_steps: int
    needed_seconds: float  # that had to be left for going on


def judge(
    left_seconds: float, step: int, steps: StepClock, saves: SaveClock, margin: Margin, *, pending: int = 0
) -> Judgement:
    """Decide if there is time for another step and a save.

    Args:
        left_seconds: to the end of the job.
        step: that just ended.
        steps: their times.
        saves: their times.
        margin: what to leave unused.
        pending: saves that are being written in the background and have to be complete first.
    """
    reserve = margin.seconds + margin.factor * saves.expected_seconds * (1 + pending)
    ahead = steps.ahead_seconds(step)
    slack, typical = left_seconds - reserve, steps.typical_seconds
    if slack < ahead:
        return Judgement(True, 1, reserve + ahead)
    usual = CHECK_SECONDS / typical if typical else 1.0
    # Half of what would fit, so that the last steps are judged one by one.
    fits = slack / steps.longest_seconds / 2 if steps.longest_seconds else 1.0
    count = min(usual, fits, steps.steps_to_pause(step), MOST_STEPS)
    return Judgement(False, max(1, int(count)), reserve + ahead)
