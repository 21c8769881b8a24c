"""Names of `deepspeed.runtime.zero.partition_parameters` that other libraries read or put wrappers around."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from mpispeed.compat.accelerator import get_accelerator
from mpispeed.sharding.param_facts import ZeroParamStatus

__all__ = [
    "ZeroParamStatus",
    "ZeroParamType",
    "_orig_torch_arange",
    "get_accelerator",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


class ZeroParamType(Enum):
    """Kinds of parameters under ZeRO-3."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """Wrap a constructor of torch so that floating-point tensors have `target_fp_dtype`.

    `zero.Init` here converts parameters when they are registered and leaves torch's constructors alone; libraries
    that replace this function by one of their own find it, and it does what its name says.
    """

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return construct
