"""The schedule by which the bits of a weight fall during training (mixture of quantization, MoQ).

Source: DeepSpeed's `runtime.quantize.Quantizer`; Shen et al., "Q-BERT", arXiv 1909.05840, for curvature as a measure of
how sensitive a layer is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpispeed.base.errors import ConfigError

_MOST_STEPS = 2**53
"""Of a state that is read: beyond, numbers of steps are no floats."""


@dataclass(frozen=True, slots=True)
class BitPlan:
    """Settings of a schedule.

    Attributes:
        start: bits at the first step.
        target: bits in the end; not more than `start`.
        period: steps after which the first bit falls.
        offset: updates before the first of these steps.
        change: by how much the part of a weight that is not quantized shrinks in each step; 0: all of it is quantized.
    """

    start: int
    target: int
    period: int = 1
    offset: int = 0
    change: float = 0.0


class BitSchedule:
    """The bits of one layer: each period costs one bit, and the next is at least twice as long.

    Attributes:
        plan: the settings.
        steps: updates since the offset, negative before it; up to 0 nothing is quantized.
        bits: those of the present step.
        period: the step at which the next bit falls.
    """

    def __init__(self, plan: BitPlan) -> None:
        """Start before the first step.

        Raises:
            ConfigError: the bits would have to grow.
        """
        if plan.start < plan.target:
            msg = f"start_bits is {plan.start} and target_bits {plan.target}; bits only fall: start with more"
            raise ConfigError(msg)
        self.plan = plan
        self.steps, self.bits, self.period = -plan.offset, plan.start, plan.period
        self._faded = 0  # steps since the last bit fell

    @property
    def is_falling(self) -> bool:
        """True if there are bits to lose."""
        return self.bits > self.plan.target

    @property
    def mix(self) -> float:
        """The part rho of the weight that is not quantized yet: rho w + (1 - rho) quantized(w); 1 before the start."""
        if self.steps < 1:
            return 1.0
        return max(0.0, 1.0 - self.plan.change * self._faded) if self.plan.change else 0.0

    def advance(self, curvature: float | None = None) -> None:
        """Count an applied optimizer step.

        Args:
            curvature: the layer's largest eigenvalue beside that of the other layers, from 0 to 1; the next period
                gets longer by 1 + floor(4 curvature). None: unknown, as 0.
        """
        self.steps += 1
        if self.steps < 1:
            return
        self._faded += 1
        if self.is_falling and self.steps >= self.period:
            self.bits -= 1
            self.period *= 2 * (1 if curvature is None else 1 + math.floor(4 * curvature))
            self._faded = 0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"plan": asdict(self.plan), "now": [self.steps + self.plan.offset, self.bits, self.period, self._faded]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state back. With another plan bits are as that has them after as many updates.

        Raises:
            ConfigError: these are not the values of `state`.
        """
        now = state.get("now") if isinstance(state, Mapping) else None
        if not isinstance(now, list) or len(now) != 4 or not all(type(each) is int and each >= 0 for each in now):
            msg = f"the state of a schedule of bits is {now!r}; expected updates, bits, period and steps since a fall"
            raise ConfigError(msg)
        updates, *rest = now
        self.steps = updates - self.plan.offset
        if state.get("plan") == asdict(self.plan):
            bits, period, faded = rest
            is_near = self.plan.target <= bits <= self.plan.start and faded <= updates <= _MOST_STEPS
            if not is_near or period < self.plan.period:
                msg = f"the state of a schedule of bits is {now!r:.100}, which no schedule comes to by {self.plan}"
                raise ConfigError(msg)
            self.bits, self.period, self._faded = rest
            return
        self.bits, self.period, self._faded = self.plan.start, self.plan.period, max(self.steps, 0)
        while self.is_falling and self.steps >= self.period:
            self._faded = self.steps - self.period
            self.bits -= 1
            self.period *= 2
