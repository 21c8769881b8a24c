"""Names of `deepspeed.runtime.torch_autocast`: in which dtype the gradient of a parameter travels."""

from __future__ import annotations

import torch
from torch import nn

from mpispeed.config.mixed import SAFE_MODULES
from mpispeed.plan.mixed import classes_of
from mpispeed.sharding import sharded_param
from mpispeed.sharding.params import ParamStore


def get_default_autocast_lower_precision_modules() -> list[type[nn.Module]]:
    """Classes of modules whose gradients travel in the dtype of autocast unless the config names others."""
    return list(classes_of(SAFE_MODULES))


def has_comm_dtype(param: nn.Parameter) -> bool:
    """True if an engine has the parameter, trained or frozen. Local."""
    return _wire(param) is not None


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Dtype in which gradients of the parameter are sent to other ranks; its own if no engine has it. Local."""
    return _wire(param) or param.dtype


def _wire(param: nn.Parameter) -> torch.dtype | None:
    owner = sharded_param.owner_of(param)
    place = owner.table.locate(param) if isinstance(owner, ParamStore) else None
    return None if place is None else place.unit.states.wire
