"""Floor 4: dtypes of a run and the scale of the loss. Knows torch only: no ranks, no settings files.

Square sums of `native.reduce` tell if gradients are finite, so no pass over the data is made here.
"""

from __future__ import annotations

from mpispeed.precision.cast import cast_inputs, cast_module
from mpispeed.precision.policy import Policy, resolve
from mpispeed.precision.scaler import DynamicScale, LossScale, StaticScale

__all__ = ["DynamicScale", "LossScale", "Policy", "StaticScale", "cast_inputs", "cast_module", "resolve"]
