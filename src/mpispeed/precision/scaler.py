"""Static and dynamic loss scale. The scale used in backward is also the one to unscale with; `update` comes after."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from mpispeed.base.errors import ConfigError, PrecisionError

logger = logging.getLogger(__name__)


class LossScale(Protocol):
    """Factor of the loss before backward, which follows overflows."""

    dynamic: bool
    is_exhausted: bool

    @property
    def scale(self) -> float:
        """The factor for the next backward pass."""

    def update(self, overflow: bool) -> None:
        """Take note of one optimizer step; `overflow` must be the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers from which `load_state_dict` goes on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


class _Counted:
    """Names under which scales are read from outside, shared by both kinds."""

    dynamic = False
    is_exhausted = False

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self.cur_iter = 0

    @property
    def scale(self) -> float:
        """The factor for the next backward pass."""
        return self._scale

    @property
    def loss_scale(self) -> float:
        """The same as `scale`."""
        return self._scale

    @property
    def cur_scale(self) -> float:
        """The same as `scale`."""
        return self._scale

    def _matches(self, state: Mapping[str, Any]) -> bool:
        """True if `state` is of this kind of scale; else it is left aside with a warning."""
        if bool(state.get("dynamic_loss_scale", self.dynamic)) == self.dynamic:
            return True
        kinds = ("dynamic", "static") if self.dynamic else ("static", "dynamic")
        logger.warning("the loss scale is %s now and was %s when saved; it starts at %g", *kinds, self._scale)
        return False


class StaticScale(_Counted):
    """A loss scale that never changes; the step that overflowed is still skipped by the caller."""

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            msg = f"fp16.loss_scale is {scale!r}; a static scale is a number above 0 (0 asks for a dynamic one)"
            raise ConfigError(msg)
        super().__init__(float(scale))

    def update(self, overflow: bool) -> None:
        """Count the step; the scale stays, with or without `overflow`."""
        del overflow
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers from which `load_state_dict` goes on."""
        return {"dynamic_loss_scale": False, "cur_scale": self._scale, "cur_iter": self.cur_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; the state of a dynamic scale is left aside with a warning."""
        if self._matches(state):
            self._scale, self.cur_iter = float(state["cur_scale"]), int(state["cur_iter"])


class DynamicScale(_Counted):
    """A loss scale that doubles after `loss_scale_window` clean steps and halves when credit for overflows is used up.

    An overflow costs one credit while there is more than one; with one left the scale halves, and the
    credit is not refilled by that. Credit returns to `hysteresis` when the scale grows, or after every
    clean step with `consecutive_hysteresis`. An overflow at the smallest allowed scale ends the run, or with
    `goes_on` only skips its step.
    """

    dynamic = True
    scale_factor = 2.0

    def __init__(
        self,
        initial_scale_power: float = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1,
        *,
        max_loss_scale: float = math.inf,
        first_scale: float | None = None,
        goes_on: bool = False,
    ) -> None:
        """Start at `first_scale`, by default 2 to the power `initial_scale_power`.

        Raises:
            ConfigError: a setting is out of its range.
        """
        for setting, value in (("loss_scale_window", loss_scale_window), ("hysteresis", hysteresis)):
            if value < 1:
                msg = f"fp16.{setting} is {value!r}; it counts steps and must be at least 1"
                raise ConfigError(msg)
        if not min_loss_scale > 0:
            msg = f"fp16.min_loss_scale is {min_loss_scale!r}; it must be above 0"
            raise ConfigError(msg)
        super().__init__(2.0**initial_scale_power if first_scale is None else first_scale)
        self.max_loss_scale = max_loss_scale
        self.scale_window = loss_scale_window
        self.min_loss_scale = min_loss_scale
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.is_exhausted = False
        self.last_overflow_iter = -1
        self._goes_on = goes_on
        self._credit = hysteresis

    def update(self, overflow: bool) -> None:
        """Take note of one optimizer step; `overflow` must be the same on all ranks.

        Sets `is_exhausted`: this step overflowed at the smallest allowed scale.

        Raises:
            PrecisionError: it did, and this scale does not go on.
        """
        self.is_exhausted = overflow and self._credit <= 1 and self._scale <= self.min_loss_scale
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            self._grow_if_due()
        self.cur_iter += 1

    def _shrink(self) -> None:
        """Lower the scale, or use up credit."""
        if self._credit > 1:
            self._credit -= 1
            return
        if self.is_exhausted and not self._goes_on:
            msg = (
                f"gradients overflowed at step {self.cur_iter} with the loss scale already at its minimum of "
                f"{self.min_loss_scale:g} (fp16.min_loss_scale); lower the learning rate, clip gradients, or use bf16"
            )
            raise PrecisionError(msg)
        self._scale = max(self._scale / self.scale_factor, float(self.min_loss_scale))

    def _grow_if_due(self) -> None:
        """Raise the scale after enough clean steps."""
        is_due = (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0
        if self.consecutive_hysteresis or is_due:
            self._credit = self.hysteresis
        if is_due:
            self._scale = min(self._scale * self.scale_factor, max(self._scale, self.max_loss_scale))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers from which `load_state_dict` goes on."""
        return {
            "dynamic_loss_scale": True,
            "cur_scale": self._scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "credit": self._credit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; the state of a static scale is left aside with a warning.

        The window, the hysteresis and the minimum stay those of this run's settings.
        """
        if not self._matches(state):
            return
        self._scale = float(state["cur_scale"])
        self.cur_iter = int(state["cur_iter"])
        self.last_overflow_iter = int(state["last_overflow_iter"])
        self._credit = min(int(state["credit"]), self.hysteresis)
