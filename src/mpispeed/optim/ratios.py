"""Schedules of torch over groups whose rates differ by factors: what a schedule says holds for the factor 1."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mpispeed.optim.rule import LR_FACTOR

if TYPE_CHECKING:
    import torch


def keeping_ratios(cls: Any, optimizer: torch.optim.Optimizer) -> type:
    """A class like the schedule `cls` for this optimizer: after each step rates are what it says times the factors.

    Rates that the schedule is given, as OneCycleLR's max_lr or CosineAnnealingLR's eta_min, are those for the factor 1,
    and so are the group's `initial_lr` and the schedule's `base_lrs`.
    """
    rates = _Unscaled(optimizer)

    class Keeping(cls):
        __doc__ = cls.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with rates:
                super().__init__(*args, **kwargs)
            self._last_lr = rates.now()

        @functools.wraps(cls.step)
        def step(self, *args: Any, **kwargs: Any) -> None:
            with rates:
                super().step(*args, **kwargs)
            self._last_lr = rates.now()

    Keeping.__name__, Keeping.__qualname__ = cls.__name__, cls.__qualname__
    return Keeping


class _Unscaled:
    """Context in which groups have their rates without factors; it may be entered again within."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups, self._depth = optimizer.param_groups, 0
        self._factors: list[float] = [group.get(LR_FACTOR, 1.0) for group in self._groups]
        self._left: list[tuple[Any, Any]] = [(None, None)] * len(self._groups)  # rate, and the one without factor

    def now(self) -> list[Any]:
        """The rates of the groups."""
        return [group["lr"] for group in self._groups]

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for group, factor, (scaled, rate) in zip(self._groups, self._factors, self._left, strict=True):
            # As it was left, so that many steps add no rounding errors; scripts may have set another.
            group["lr"] = rate if group["lr"] == scaled else group["lr"] / factor

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        rates = self.now()
        for group, factor, rate in zip(self._groups, self._factors, rates, strict=True):
            group["lr"] = rate * factor
        self._left = list(zip(self.now(), rates, strict=True))
