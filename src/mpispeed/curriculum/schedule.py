"""Difficulty as a function of the step.

Source of the schedules and their keys: DeepSpeed's documentation of curriculum learning and of its
data efficiency library.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any

from mpispeed.base.errors import ConfigError, UnsupportedOption, UsageError

log = logging.getLogger(__name__)

MOST_ROOT = 1000
"""Largest numerator of a root's degree, as a fraction, up to which roots are exact."""
_WANTED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """The difficulty of a run, which grows from a minimum to a maximum.

    Methods have DeepSpeed's names. Difficulties of fixed_linear and fixed_root are

        floor((step / total_curriculum_step) ** (1 / root_degree) * (max - min) + min)

    down to a multiple of `difficulty_step`, and between `min_difficulty` and `max_difficulty`. The floor is that of the
    exact value, where floats miss it by one now and then. Where the maximum is no multiple of `difficulty_step`, it is
    reached at the step at which the next multiple would be, after `total_curriculum_step`.

    Attributes:
        kind: schedule_type of the config.
        min_difficulty: where it begins.
        max_difficulty: where it ends.
    """

    def __init__(self, config: Mapping[str, Any], *, warns: bool = True) -> None:
        """Begin at the minimum.

        Args:
            config: min_difficulty, max_difficulty, schedule_type, and schedule_config with the numbers of the schedule:
                total_curriculum_step, difficulty_step, and for fixed_root root_degree; for fixed_discrete the lists
                difficulty and max_step, the last step of each difficulty but the last.
            warns: warn if difficulty_step is no multiple of 8, and of what a function gives outside of the bounds.

        Raises:
            ConfigError: a key is missing or wrong; for an unknown schedule also a RuntimeError.
        """
        self.kind, self._warns = _kind_of(config), warns
        self.min_difficulty, self.max_difficulty = _bounds_of(config)
        self._numbers: dict[str, Any] = {
            key: value for key, value in dict(config.get("schedule_config") or {}).items() if value is not None
        }
        _require(self.kind, self._numbers)
        self._difficulty_at: Callable[[int], int] | None = None
        if self.kind == "fixed_discrete":
            self._difficulty_at = _steps_of(self._numbers, self.min_difficulty, self.max_difficulty)
        elif self.kind != "custom":
            self._difficulty_at = _growth_of(self._numbers, self.min_difficulty, self.max_difficulty)
            if warns and self._numbers["difficulty_step"] % 8:
                log.warning(
                    "difficulty_step %d is no multiple of 8: if the difficulty is a length, matrix products of 16-bit "
                    "numbers on GPUs are slower; ignore this for other measures of difficulty",
                    self._numbers["difficulty_step"],
                )
        self._current = self.min_difficulty

    @property
    def is_custom(self) -> bool:
        """True if the difficulty is that of a function of the script."""
        return self.kind == "custom"

    def difficulty_at(self, step: int) -> int:
        """The difficulty of a step, which is counted from 1; steps below it have that of step 0. Changes nothing.

        Raises:
            UsageError: schedule_type is custom, and no function was set, or it returned no whole number.
        """
        if self._difficulty_at is None:
            msg = (
                "schedule_type custom needs a function of the step: call "
                "engine.set_custom_curriculum_learning_schedule({metric: fn}), with the metric seqlen for the section "
                "curriculum_learning, or set_custom_get_difficulty(fn) of a CurriculumScheduler, before training"
            )
            raise UsageError(msg)
        return self._difficulty_at(max(step, 0))

    def update_difficulty(self, step: int) -> int:
        """Go to a step, counted from 1, and return its difficulty; once the maximum is reached, it stays.

        Raises:
            UsageError: as `difficulty_at`.
        """
        if self._current < self.max_difficulty:
            self._current = self.difficulty_at(step)
        return self._current

    def get_difficulty(self, step: int) -> int:
        """The same as `difficulty_at`, by DeepSpeed's name."""
        return self.difficulty_at(step)

    def get_current_difficulty(self) -> int:
        """The difficulty of the last update, or the minimum."""
        return self._current

    def set_current_difficulty(self, difficulty: int) -> None:
        """Have this difficulty until the next update; for good if it is the maximum.

        Raises:
            UsageError: it is no whole number, or outside of minimum and maximum.
        """
        found = _whole(difficulty, "set_current_difficulty()")
        if not self.min_difficulty <= found <= self.max_difficulty:
            msg = f"set_current_difficulty({found}): outside of {self._bounds()}"
            raise UsageError(msg)
        self._current = found

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Take the difficulties of schedule_type custom from a function of the step.

        Those outside of minimum and maximum become the nearer of them.

        Raises:
            UsageError: schedule_type is another.
        """
        if not self.is_custom:
            msg = (
                f"a function gives the difficulty for schedule_type custom only, and it is {self.kind}; "
                "change schedule_type, or leave the call out"
            )
            raise UsageError(msg)
        self._difficulty_at = lambda step: self._clamped(schedule_function(step))

    def get_state(self) -> dict[str, Any]:
        """The current difficulty, and the schedule that it comes from, with DeepSpeed's keys."""
        return {
            "current_difficulty": self._current,
            "min_difficulty": self.min_difficulty,
            "max_difficulty": self.max_difficulty,
            "schedule_type": self.kind,
            "schedule_config": dict(self._numbers),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take back the current difficulty. The schedule stays that of the config.

        A difficulty of other bounds than these is not taken: the next update gives that of its step.

        Raises:
            UsageError: as `check_state`.
        """
        self.check_state(state)
        value = int(state["current_difficulty"])
        same = state.get("max_difficulty", self.max_difficulty) == self.max_difficulty
        fits = same and self.min_difficulty <= value <= self.max_difficulty
        self._current = value if fits else self.min_difficulty

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `set_state` would.

        Raises:
            UsageError: the state has no difficulty, or no whole number.
        """
        if "current_difficulty" not in state:
            msg = (
                f"the state of a curriculum needs current_difficulty, and has {', '.join(map(str, state)) or 'nothing'}"
            )
            raise UsageError(msg)
        _whole(state["current_difficulty"], "current_difficulty of the state of a curriculum")

    state_dict, load_state_dict = get_state, set_state

    def _clamped(self, value: Any) -> int:
        """A difficulty of a script's function, between minimum and maximum."""
        found = _whole(value, "the function of a curriculum's schedule")
        inside = max(self.min_difficulty, min(found, self.max_difficulty))
        if inside != found and self._warns:
            self._warns = False
            log.warning(
                "the function of the schedule gave the difficulty %d, outside of %s; %d is used, and so on",
                found, self._bounds(), inside,
            )  # fmt: skip
        return inside

    def _bounds(self) -> str:
        return f"min_difficulty {self.min_difficulty} and max_difficulty {self.max_difficulty}"


def _whole(value: Any, source: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        msg = f"{source} gave {value!r}; expected a whole number"
        raise UsageError(msg) from None


# -- checks of settings ------------------------------------------------------------------------------------------------


def _kind_of(config: Mapping[str, Any]) -> str:
    for key in ("min_difficulty", "max_difficulty", "schedule_type"):
        if config.get(key) is None:
            msg = f"curriculum learning needs {key}; add it"
            raise ConfigError(msg)
    kind = str(config["schedule_type"])
    if kind not in _WANTED:
        msg = f"schedule_type {kind!r} of curriculum learning is unknown; use one of {', '.join(_WANTED)}"
        raise UnsupportedOption(msg)
    return kind


def _bounds_of(config: Mapping[str, Any]) -> tuple[int, int]:
    low, high = (_count(config[key], key, least=0) for key in ("min_difficulty", "max_difficulty"))
    if low > high:
        msg = f"min_difficulty {low} is more than max_difficulty {high}"
        raise ConfigError(msg)
    return low, high


def _count(value: Any, key: str, *, least: int) -> int:
    """A whole number of at least `least`, of the settings."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        msg = f"{key} of curriculum learning is {value!r}; expected a whole number of at least {least}"
        raise ConfigError(msg)
    return operator.index(value)


def _require(kind: str, numbers: Mapping[str, Any]) -> None:
    missing = [key for key in _WANTED[kind] if key not in numbers]
    if missing:
        msg = f"schedule_config needs {' and '.join(missing)} for schedule_type {kind}; add them"
        raise ConfigError(msg)


# -- schedules ---------------------------------------------------------------------------------------------------------


def _steps_of(numbers: Mapping[str, Any], low: int, high: int) -> Callable[[int], int]:
    """fixed_discrete: the difficulty of the first `max_step` that is not passed, or the last one."""
    levels = [_count(value, "schedule_config.difficulty", least=0) for value in numbers["difficulty"]]
    lasts = [_count(value, "schedule_config.max_step", least=0) for value in numbers["max_step"]]
    if not lasts or len(levels) != len(lasts) + 1:
        msg = (
            f"schedule_config.max_step has {len(lasts)} entries for {len(levels)} difficulties; "
            "expected one less than difficulties, and at least one"
        )
        raise ConfigError(msg)
    late = next((last for last, following in pairwise(lasts) if last > following), None)
    if late is not None:
        msg = f"schedule_config.max_step has {late} before a smaller one; expected last steps in their order"
        raise ConfigError(msg)
    outside = [level for level in levels if not low <= level <= high]
    if outside:
        msg = f"schedule_config.difficulty {outside[0]} is outside of min_difficulty {low} and max_difficulty {high}"
        raise ConfigError(msg)
    return lambda step: levels[bisect_left(lasts, step)]


def _growth_of(numbers: Mapping[str, Any], low: int, high: int) -> Callable[[int], int]:
    """fixed_linear and fixed_root."""
    total = _count(numbers["total_curriculum_step"], "schedule_config.total_curriculum_step", least=1)
    multiple = _count(numbers["difficulty_step"], "schedule_config.difficulty_step", least=1)
    degree = _degree_of(numbers.get("root_degree", 1))
    grown = high - low

    def difficulty_at(step: int) -> int:
        found = _root_part(step, total, degree, grown) + low
        return max(low, min(found - found % multiple, high))

    return difficulty_at


def _degree_of(value: Any) -> Fraction:
    """The degree as it is written: 2.3 is 23/10."""
    try:
        degree = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        degree = Fraction(0)
    if degree <= 0:
        msg = f"schedule_config.root_degree is {value!r}; expected a number above 0"
        raise ConfigError(msg)
    return degree


def _root_part(step: int, total: int, degree: Fraction, grown: int) -> int:
    """floor((step / total) ** (1 / degree) * grown)."""
    power, root = degree.denominator, degree.numerator
    if max(power, root) > MOST_ROOT:  # whole powers would have millions of digits
        return floor((step / total) ** (1.0 / float(degree)) * grown)
    # k <= (s / T) ** (q / p) * D is k ** p <= s ** q * D ** p / T ** q
    return _whole_root(step**power * grown**root // total**power, root)


def _whole_root(value: int, degree: int) -> int:
    """The largest whole number whose power is at most `value`, by Newton's method from above."""
    if value < 2 or degree == 1:
        return value
    found = 1 << -(-value.bit_length() // degree)
    while True:
        lower = ((degree - 1) * found + value // found ** (degree - 1)) // degree
        if lower >= found:
            return found
        found = lower
