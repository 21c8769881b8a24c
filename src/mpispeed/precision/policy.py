"""Dtypes of a run: of computation, accumulated gradients, masters and messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpispeed.base.errors import ConfigError

_BY_NAME = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}
_SUPPORTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Policy:
    """The four dtypes of a run."""

    compute: torch.dtype  # parameters during forward and backward
    accumulate: torch.dtype  # gradients at rest, over micro-batches
    master: torch.dtype  # the copy that the optimizer updates
    communicate: torch.dtype  # gradients on their way to other ranks


def parse_dtype(value: str | torch.dtype, setting: str) -> torch.dtype:
    """The torch dtype for a name such as "fp16", "bfloat16" or "torch.float32"; case does not matter.

    Raises:
        ConfigError: the name is none of the known ones; `setting` is named in the message.
    """
    if isinstance(value, torch.dtype):
        if value in _SUPPORTED:
            return value
    elif isinstance(value, str):
        found = _BY_NAME.get(value.lower().removeprefix("torch."))
        if found is not None:
            return found
        if value.lower() == "int8":
            msg = f'{setting} is "int8", which cannot hold gradients here; use "fp32", "bf16" or "fp16"'
            raise ConfigError(msg)
    msg = f'{setting} is {value!r}; expected "fp16", "bf16" or "fp32"'
    raise ConfigError(msg)


def resolve(
    fp16_enabled: bool = False,
    bf16_enabled: bool = False,
    grad_accum_dtype: str | torch.dtype | None = None,
    communication_data_type: str | torch.dtype | None = None,
    model_dtype: torch.dtype = torch.float32,
) -> Policy:
    """The dtypes for the given settings and the dtype the model came in.

    With neither fp16 nor bf16 the model keeps its dtype. Gradients of 16-bit models add up in fp32
    unless `grad_accum_dtype` says otherwise; messages travel in the compute dtype unless
    `communication_data_type` says otherwise. Masters are fp32, or fp64 for an fp64 model.

    Raises:
        ConfigError: both fp16 and bf16 are on, or a dtype is not supported.
    """
    if fp16_enabled and bf16_enabled:
        msg = "fp16.enabled and bf16.enabled are both true; a model computes in one dtype, switch one of them off"
        raise ConfigError(msg)
    if fp16_enabled:
        compute = torch.float16
    elif bf16_enabled:
        compute = torch.bfloat16
    else:
        compute = model_dtype
    if compute not in _SUPPORTED:
        msg = f"the model's parameters are {compute}; supported are float64, float32, bfloat16 and float16"
        raise ConfigError(msg)
    master = torch.float64 if compute == torch.float64 else torch.float32
    accumulate, communicate = master, compute
    if grad_accum_dtype is not None:
        accumulate = parse_dtype(grad_accum_dtype, "data_types.grad_accum_dtype")
    if communication_data_type is not None:
        communicate = parse_dtype(communication_data_type, "communication_data_type")
    return Policy(compute=compute, accumulate=accumulate, master=master, communicate=communicate)
