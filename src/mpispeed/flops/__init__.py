"""Floor 6, flops: counts the floating-point operations of a model, by module and by pass, with two ways of counting.

Knows torch, and what operators of `native` and calls of `nn` compute. Must not know the configuration or the engine:
who profiles a step starts a counter around it and reads it afterwards.
"""

from __future__ import annotations

from mpispeed.flops.by_module import Counts, ModuleCounter
from mpispeed.flops.model_profile import get_model_profile
from mpispeed.flops.profiler import FlopsProfiler, flops_of_step

__all__ = ["Counts", "FlopsProfiler", "ModuleCounter", "flops_of_step", "get_model_profile"]
