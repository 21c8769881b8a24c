"""Floor 4: which dtype is used where, and how the loss is scaled. Knows torch only: no ranks, no settings files.

Whether a gradient is finite is answered by the square sums of `native.reduce`, so no pass over the data is made here.
"""

from __future__ import annotations

from mpispeed.precision.cast import cast_inputs, cast_module
from mpispeed.precision.policy import Policy, resolve
from mpispeed.precision.scaler import DynamicScale, LossScale, StaticScale

__all__ = ["DynamicScale", "LossScale", "Policy", "StaticScale", "cast_inputs", "cast_module", "resolve"]
