"""Floor 4: update rules over flat windows, and learning rates as functions of the step.

A rule updates the windows it is given; their parameters, ranks and tiers are not known here. Knows torch and the
kernels of `native`: no ranks, no settings files.

State: own rules (`Adam`, `Adagrad`, `Lion`, `Lamb`, `Muon`, `SGD`) hold theirs in `Window.state`, which the caller
allocates as zeros of `rule.state_names` and stores; next to it they need nothing but `Window.step`. The 1-bit rules
(`OnebitAdam`, `ZeroOneAdam`, `OnebitLamb`) also choose the quantity that ranks exchange, see `exchange`. A rule that is
a `KeepsState` (`Foreign`) holds its own: read it with `slots` and `window_scalars`, restore it with `restore`.
"""

from __future__ import annotations

from mpispeed.optim.cpu import CPUAdagrad, CPUAdam, CPULamb, CPULion
from mpispeed.optim.fused import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from mpispeed.optim.schedule import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from mpispeed.optim.tuning_args import (
    VALID_LR_SCHEDULES,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "CPUAdagrad",
    "CPUAdam",
    "CPULamb",
    "CPULion",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "LRRangeTest",
    "OneCycle",
    "OnebitAdam",
    "OnebitLamb",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOneAdam",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_params",
    "parse_arguments",
]
