"""Learning-rate schedules: five of our own, chosen by name before those of torch.

The lr of the n-th optimizer step (n from 1) is the value at index n - 2: the constructor writes the
value at index -1, and every `step()` after an applied optimizer step moves the index on by one.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpispeed.base import log, torch_names
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.registry import Registry, did_you_mean
from mpispeed.optim.ratios import keeping_ratios
from mpispeed.optim.rule import LR_FACTOR, check_keywords, drop_auto

logger = logging.getLogger(__name__)

_LARGEST_MOMENTUM = 0.999
_SECOND_BETA = 0.99


def _nothing() -> None:
    """Do nothing."""


class Schedule(ABC):
    """Base of all schedules; a schedule defines `_values`, the lr of every group at an index.

    The index `last_batch_iteration` is -1 before the first step. With another one (a resumed run) the constructor
    leaves the optimizer as it is.

    Attributes:
        settle: called before something is read: an engine that has stepped may still have to take that back.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.settle: Callable[[], object] = _nothing
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @property
    def last_batch_iteration(self) -> int:
        """The index; -1 before the first step. May wait for a device."""
        self.settle()
        return self._index

    @last_batch_iteration.setter
    def last_batch_iteration(self, index: int) -> None:
        self._index = index

    def _start(self) -> None:
        if self.last_batch_iteration == -1:
            self._write()

    @abstractmethod
    def _values(self, index: int) -> list[float]:
        """The lr of every group at `index`."""

    def _of_groups(self, index: int) -> list[float]:
        """`_values`, where groups have factors times these."""
        groups = self.optimizer.param_groups
        return [lr * group.get(LR_FACTOR, 1.0) for lr, group in zip(self._values(index), groups, strict=True)]

    def _write(self) -> None:
        values = self._of_groups(self.last_batch_iteration)
        for group, lr in zip(self.optimizer.param_groups, values, strict=True):
            group["lr"] = lr
        self._last_lr = values

    def step(self, batch_iteration: int | None = None) -> None:
        """Move to the next index, or to `batch_iteration`, and write the values into the groups."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._write()

    def get_lr(self) -> list[float]:
        """The lr of every group at the current index."""
        return self._of_groups(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """The values that were written last.

        Raises:
            UsageError: nothing was written so far (also an AssertionError).
        """
        self.settle()
        if self._last_lr is None:
            msg = f"the last lr of {type(self).__name__} is not known: need to call step() first"
            raise UsageError(msg)
        return self._last_lr

    def state_dict(self) -> dict[str, int]:
        """The index, which is all the state there is."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the index from `state` and write its values into the groups."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _per_group(self, key: str, value: float | Sequence[float]) -> list[float]:
        """One value per group from a number or a list of them.

        Raises:
            ConfigError: the list is not as long as there are groups.
        """
        count = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [_number(type(self).__name__, key, value)] * count
        if len(value) != count:
            msg = f"{key} of {type(self).__name__} has {len(value)} values, the optimizer has {count} parameter groups"
            raise ConfigError(msg)
        return [_number(type(self).__name__, key, item) for item in value]


SCHEDULES: Registry[type[Schedule]] = Registry("scheduler type")
"""Our own schedules by the name used in JSON files; upper and lower case matter."""


@SCHEDULES.register("LRRangeTest")
class LRRangeTest(Schedule):
    """Raises the lr without end, to find the range in which training is stable."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _positive("LRRangeTest", "lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("LRRangeTest", "lr_range_test_step_rate", lr_range_test_step_rate)
        self.is_staircase = lr_range_test_staircase
        self._start()

    def _values(self, index: int) -> list[float]:
        intervals = (index + 1) / self.step_size
        if self.is_staircase:
            intervals = math.floor(intervals)
        return [low * (1 + self.step_rate * intervals) for low in self.min_lr]


@SCHEDULES.register("OneCycle")
class OneCycle(Schedule):
    """One rise and fall of the lr, with momentum the other way round, then a decay of both.

    The stair counts are accepted and have no effect.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        del cycle_first_stair_count, cycle_second_stair_count
        name = type(self).__name__
        self.min_lr = _number(name, "cycle_min_lr", cycle_min_lr)
        self.max_lr = _number(name, "cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _number(name, "decay_lr_rate", decay_lr_rate)
        self.first_size = _positive(name, "cycle_first_step_size", cycle_first_step_size)
        if cycle_second_step_size is None or cycle_second_step_size == -1:  # -1: not given on the command line
            self.second_size = self.first_size
        else:
            self.second_size = _number(name, "cycle_second_step_size", cycle_second_step_size, least=0)
        self.total_size = self.first_size + self.second_size
        self.decay_step_size = _number(name, "decay_step_size", decay_step_size, least=0)
        self.min_mom = _number(name, "cycle_min_mom", cycle_min_mom)
        self.max_mom = _number(name, "cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = _number(name, "decay_mom_rate", decay_mom_rate)
        self.has_momentum = cycle_momentum
        self._has_warned = False
        if cycle_momentum and "betas" not in self.optimizer.defaults:
            kind = type(self.optimizer).__name__
            logger.warning("OneCycle leaves the momentum alone: the optimizer %s has no betas", kind)
            self.has_momentum = False
        if last_batch_iteration == -1:
            self._write()
            self._last_lr = None  # the first step is still to come

    def _rise(self, index: int) -> float:
        """Fraction of the cycle above its lower end: 0 to 1 in the first part, back to 0 in the second."""
        position = ((index + 1) % self.total_size) / self.total_size
        turn = self.first_size / self.total_size
        return position / turn if position <= turn else (position - 1) / (turn - 1)

    def _decay(self, index: int, rate: float) -> float:
        """The factor `1 + rate * intervals` after the cycle; 1 when there is no decay."""
        if _is_zero(self.decay_step_size) or _is_zero(rate):
            return 1.0
        return 1 + rate * (index - self.total_size + 1) / self.decay_step_size

    def _values(self, index: int) -> list[float]:
        if index < self.total_size:
            lr = _between(self.min_lr, self.max_lr, self._rise(index))
        else:
            lr = self.min_lr / self._decay(index, self.decay_lr_rate)
        return [lr] * len(self.optimizer.param_groups)

    def _momentum(self, index: int) -> float:
        if index < self.total_size:
            return _between(self.max_mom, self.min_mom, self._rise(index))
        value = self.max_mom * self._decay(index, self.decay_mom_rate)
        largest = max(self.max_mom, _LARGEST_MOMENTUM)
        if value <= largest:
            return value
        if not self._has_warned:
            logger.warning("the momentum of OneCycle grows beyond %g (decay_mom_rate) and is held there", largest)
            self._has_warned = True
        return largest

    def _write_momentum(self) -> None:
        if self.has_momentum:
            for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=True):
                group["betas"] = betas

    def _write(self) -> None:
        super()._write()
        self._write_momentum()

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Both betas of every group at the current index, or None when momentum is left alone."""
        if not self.has_momentum:
            return None
        return [(self._momentum(self.last_batch_iteration), _SECOND_BETA)] * len(self.optimizer.param_groups)


class _Warmup(Schedule):
    """Common rise of the three warm-up schedules."""

    def _set_warmup(self, warmup_num_steps: int, warmup_type: str) -> None:
        name = type(self).__name__
        self.warmup_num_steps = max(2.0, _number(name, "warmup_num_steps", warmup_num_steps))
        self.is_linear = warmup_type == "linear"
        if warmup_type not in ("log", "linear"):
            logger.warning('%s: warmup_type is %r, known are "log" and "linear"; log is used', name, warmup_type)

    def _check_total(self, total_num_steps: int) -> None:
        name = type(self).__name__
        self.total_num_steps = _number(name, "total_num_steps", total_num_steps, least=0)
        if self.total_num_steps < self.warmup_num_steps:
            counts = (self.total_num_steps, self.warmup_num_steps)
            logger.warning("%s: total_num_steps is %g, less than the %g steps of warm-up", name, *counts)

    def _rise(self, index: int) -> float:
        if index >= self.warmup_num_steps:
            return 1.0
        return (
            index / self.warmup_num_steps if self.is_linear else math.log(index + 1) / math.log(self.warmup_num_steps)
        )

    def get_lr(self) -> list[float]:
        """The lr of every group at the current index; warns before the first step."""
        if self.last_batch_iteration < 0:
            message = f"the lr of {type(self).__name__} was asked for before its first step; it is the start value"
            log.once(logger, logging.WARNING, message)
        return super().get_lr()


@SCHEDULES.register("WarmupLR")
class WarmupLR(_Warmup):
    """A rise from `warmup_min_lr` to `warmup_max_lr`, which then stays."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", warmup_max_lr)
        self._set_warmup(warmup_num_steps, warmup_type)
        self._start()

    def _share(self, index: int) -> float:
        """Fraction of the lr above its lower end, 0 to 1."""
        return self._rise(index)

    def _values(self, index: int) -> list[float]:
        if index < 0:
            return list(self.min_lrs)
        share = self._share(index)
        return [_between(low, high, share) for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


@SCHEDULES.register("WarmupDecayLR")
class WarmupDecayLR(WarmupLR):
    """A warm-up, then a straight fall to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._check_total(total_num_steps)

    def _share(self, index: int) -> float:
        if index < self.warmup_num_steps:
            return self._rise(index)
        return max(0.0, (self.total_num_steps - index) / max(1.0, self.total_num_steps - self.warmup_num_steps))


@SCHEDULES.register("WarmupCosineLR")
class WarmupCosineLR(_Warmup):
    """A warm-up to the groups' lr at construction, then half a cosine down to a share of it, which stays."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._set_warmup(warmup_num_steps, warmup_type)
        self._check_total(total_num_steps)
        self.warmup_min_ratio = _number("WarmupCosineLR", "warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("WarmupCosineLR", "cos_min_ratio", cos_min_ratio)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._start()

    def _ratio(self, index: int) -> float:
        if index < 0:
            return 0.0
        if index < self.warmup_num_steps:
            return _between(self.warmup_min_ratio, 1.0, self._rise(index))
        length = self.total_num_steps - self.warmup_num_steps
        done = index - self.warmup_num_steps + 1
        if done >= length:
            return max(0.0, self.cos_min_ratio)
        return max(0.0, _between(self.cos_min_ratio, 1.0, (1 + math.cos(math.pi * done / length)) / 2))

    def _of_groups(self, index: int) -> list[float]:
        return self._values(index)  # the lr at construction had the factors

    def _values(self, index: int) -> list[float]:
        ratio = self._ratio(index)
        return [lr * ratio for lr in self.org_lrs]


def build_schedule(type_name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """The schedule called `type_name`: one of ours, else a class of torch.optim.lr_scheduler.

    `params` are the keywords of its constructor; values left at "auto" count as absent.

    Raises:
        ConfigError: the name is unknown (also an AssertionError), or a parameter is unknown, missing or wrong.
        TypeError: `optimizer` is none of torch.
    """
    given = drop_auto(params)
    owner = f"the scheduler {type_name}"
    cls: Callable[..., Any]
    if type_name in SCHEDULES:
        cls = SCHEDULES[type_name]
        if "total_num_steps" not in given and issubclass(SCHEDULES[type_name], (WarmupDecayLR, WarmupCosineLR)):
            found = "is left at 'auto'" if "total_num_steps" in (params or {}) else "is missing"
            msg = f"total_num_steps {found} in scheduler.params of {type_name}; it has no default, give the step count"
            raise ConfigError(msg)
    else:
        cls = _torch_schedule(type_name)
    check_keywords(cls, given, owner, skip=1)
    if "optimizer" in given:
        msg = f"{owner} gets its optimizer from the engine; remove 'optimizer' from scheduler.params"
        raise ConfigError(msg)
    inner = torch_optimizer(optimizer)
    if type_name not in SCHEDULES and any(group.get(LR_FACTOR, 1.0) != 1.0 for group in inner.param_groups):
        cls = keeping_ratios(cls, inner)
    return cls(inner, **given)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """`optimizer` itself, or the one it wraps as its attribute `optimizer`.

    Raises:
        TypeError: neither is a `torch.optim.Optimizer`.
    """
    inner = getattr(optimizer, "optimizer", None)
    for candidate in (optimizer, inner):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    msg = f"a schedule needs a torch.optim.Optimizer or an object that has one as .optimizer, not {optimizer!r}"
    raise TypeError(msg)


def _torch_schedule(type_name: str) -> Callable[..., Any]:
    found = torch_names.schedules()
    if type_name in found:
        return found[type_name]
    own = sorted(SCHEDULES)
    msg = (
        f"{type_name!r} is not a known scheduler type (scheduler.type); known are {', '.join(own)} "
        f"and {', '.join(sorted(found))} of torch.optim.lr_scheduler.{did_you_mean(type_name, [*own, *found])}"
    )
    raise ConfigError(msg)


def _between(start: float, end: float, share: float) -> float:
    # Both ends exactly: `start + (end - start)` may round to a neighbour of `end`.
    return end if share == 1 else start + (end - start) * share


def _is_zero(value: float) -> bool:
    return math.isclose(value, 0.0, abs_tol=1e-12)


def _number(owner: str, key: str, value: Any, *, least: float = -math.inf) -> float:
    """`value` as a float, checked.

    Raises:
        ConfigError: it is no number, or below `least`.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number >= least:
        wanted = "a number" if least == -math.inf else f"a number of at least {least:g}"
        msg = f"{key} of {owner} is {value!r}; expected {wanted}"
        raise ConfigError(msg)
    return number


def _positive(owner: str, key: str, value: Any) -> float:
    number = _number(owner, key, value)
    if number <= 0:
        msg = f"{key} of {owner} is {value!r}; expected a number above 0"
        raise ConfigError(msg)
    return number
