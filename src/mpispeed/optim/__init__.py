"""Floor 4: update rules over flat windows, and learning rates as functions of the step.

A rule updates the windows it is given; which parameters they were cut from, and on which rank or tier
they lie, is not known here. Knows torch and the kernels of `native`: no ranks, no settings files.

State: own rules (`Adam`, `Adagrad`, `Lion`, `Lamb`, `SGD`) hold theirs in `Window.state`, which the caller
allocates as zeros of `rule.state_names` and stores; next to it they need nothing but `Window.step`. The 1-bit rules
(`OnebitAdam`, `ZeroOneAdam`, `OnebitLamb`) also say what ranks tell each other, see `exchange`. A rule that is a
`KeepsState` (`Foreign`) holds its own: read it with `slots` and `window_scalars`, give it back with
`restore`.
"""

from __future__ import annotations

from mpispeed.optim.adagrad import Adagrad
from mpispeed.optim.adam import Adam
from mpispeed.optim.choice import build
from mpispeed.optim.cpu import CPUAdagrad, CPUAdam, CPULamb, CPULion
from mpispeed.optim.exchange import Exchange, Exchanges, MixesMomentum
from mpispeed.optim.foreign import Foreign, is_elementwise, split_state
from mpispeed.optim.fused import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.lion import Lion
from mpispeed.optim.onebit_adam import OnebitAdam
from mpispeed.optim.onebit_lamb import OnebitLamb
from mpispeed.optim.rule import RULES, KeepsState, Rule, Scalar, Window, key_text
from mpispeed.optim.schedule import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
)
from mpispeed.optim.sgd import SGD
from mpispeed.optim.tuning_args import (
    VALID_LR_SCHEDULES,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from mpispeed.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "RULES",
    "SCHEDULES",
    "SGD",
    "VALID_LR_SCHEDULES",
    "Adagrad",
    "Adam",
    "CPUAdagrad",
    "CPUAdam",
    "CPULamb",
    "CPULion",
    "Exchange",
    "Exchanges",
    "Foreign",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "KeepsState",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "MixesMomentum",
    "OneCycle",
    "OnebitAdam",
    "OnebitLamb",
    "Rule",
    "Scalar",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Window",
    "ZeroOneAdam",
    "add_tuning_arguments",
    "build",
    "build_schedule",
    "get_config_from_args",
    "get_lr_from_config",
    "is_elementwise",
    "key_text",
    "override_params",
    "parse_arguments",
    "split_state",
]
