"""The learning-rate schedule as parts of a step; its state before one can be put back."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import UsageError
from mpispeed.engine.facade import EngineOptimizer, InnerOptimizer
from mpispeed.optim.schedule import Schedule

if TYPE_CHECKING:
    from mpispeed.engine.step import StepContext


_PLAIN = (int, float, tuple, list)
"""Kinds of hyper-parameters that schedulers change."""


class AdvanceLr:
    """Advance the learning-rate schedule, after applied steps only.

    A scheduler whose `step` requires one argument, other than `metrics`, gets the train batch size.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._signature = inspect.signature(scheduler.step)
        self._wants_batch_size = self._required() not in ([], ["metrics"]) and self._fits(0)

    def _required(self) -> list[str]:
        skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = self._signature.parameters.values()
        return [p.name for p in found if p.default is p.empty and p.kind not in skipped]

    def _fits(self, *values: Any, **keywords: Any) -> bool:
        try:
            self._signature.bind(*values, **keywords)
        except TypeError:
            return False
        return True

    def check(self, lr_kwargs: dict[str, Any]) -> None:
        """Check `lr_kwargs` before anything is changed.

        Raises:
            UsageError: the scheduler cannot be called with `lr_kwargs`.
        """
        if self._wants_batch_size or self._fits(**lr_kwargs):
            return
        name, missing = type(self._scheduler).__name__, [key for key in self._required() if key not in lr_kwargs]
        if missing:
            given = ", ".join(f'"{key}": ...' for key in missing)
            msg = f"{name}.step needs {', '.join(missing)}: call engine.step(lr_kwargs={{{given}}})"
        else:
            msg = f"{name}.step{self._signature} does not take lr_kwargs {sorted(lr_kwargs)}; leave them out"
        raise UsageError(msg)

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        if ctx.skip:
            return
        if self._fits(**ctx.lr_kwargs):
            self._scheduler.step(**ctx.lr_kwargs)
        else:
            self._scheduler.step(ctx.train_batch_size)


class CheckLrKwargs:
    """Refuse a step whose `lr_kwargs` the scheduler cannot take, before anything is changed."""

    def __init__(self, advance: AdvanceLr) -> None:
        self._advance = advance

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._advance.check(ctx.lr_kwargs)


class Rates:
    """A scheduler and the hyper-parameters of groups before it steps, to put them back."""

    def __init__(self, scheduler: Any | None, groups: list[dict[str, Any]]) -> None:
        """Remember both; the scheduler is one that `fits`."""
        self._scheduler, self._groups = scheduler, groups
        self._state = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._before = [] if scheduler is None else self._hyper()
        self._after = self._before

    @staticmethod
    def fits(scheduler: Any | None) -> bool:
        """True if what the scheduler changes can be put back: its methods are those of torch or of this library."""
        methods = (getattr(scheduler, name, None) for name in ("step", "state_dict", "load_state_dict"))
        return scheduler is None or all(
            str(getattr(method, "__module__", "")).split(".")[0] in ("torch", "mpispeed") for method in methods
        )

    @staticmethod
    def is_hidden(scheduler: Any | None) -> bool:
        """True if nobody sees what the scheduler has changed without settling the step first."""
        own = (EngineOptimizer, InnerOptimizer)
        return scheduler is None or (isinstance(scheduler, Schedule) and isinstance(scheduler.optimizer, own))

    def _hyper(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self._groups]

    def stepped(self) -> None:
        """The scheduler has stepped."""
        if self._scheduler is not None:
            self._after = self._hyper()

    def put_back(self) -> None:
        """Undo the step; what a script has changed since is left as it is."""
        if self._scheduler is None:
            return
        now = self._hyper()
        self._scheduler.load_state_dict(self._state)
        for group, own, before, after in zip(self._groups, now, self._before, self._after, strict=True):
            group.update(own)
            for key, value in after.items():
                was = before.get(key)
                if isinstance(value, _PLAIN) and isinstance(was, _PLAIN) and was != value and own.get(key) == value:
                    group[key] = was
