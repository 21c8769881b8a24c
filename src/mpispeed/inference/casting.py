"""The format of a model that answers, and models whose values are yet to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.sharding.sharded_init import find_init_shard

if TYPE_CHECKING:
    from torch import nn

_KEPT = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
"""Format -> attributes of transformers' models that name modules which stay in fp32 beside it."""


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters and saved buffers in place, as transformers' `from_pretrained(dtype=...)` does.

    Buffers that no checkpoint has, as the frequencies of rotary embeddings, keep their precision; so do modules that
    the model names. The tensor objects stay the same, so tied parameters stay tied.

    Raises:
        ConfigError: the model is sharded already, in another format.
    """
    sharded = sharded_name(model)
    if sharded:
        _require_format(model, sharded, dtype)
        return
    kept = {name for attribute in _KEPT.get(dtype, ()) for name in getattr(model, attribute, None) or ()}
    saved = set(model.state_dict(keep_vars=True))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or (name not in saved and not isinstance(tensor, torch.nn.Parameter)):
            continue
        wanted = torch.float32 if kept.intersection(name.split(".")) else dtype
        if tensor.dtype != wanted:
            tensor.grad = None
            tensor.data = tensor.data.to(wanted)


def sharded_name(model: nn.Module) -> str:
    """A parameter that `zero.Init` has sharded; "" if there is none."""
    return next((name for name, param in model.named_parameters() if find_init_shard(param) is not None), "")


def _require_format(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    found = model.get_parameter(name).dtype
    if found != dtype:
        msg = f"{name} was built in zero.Init as {found}, and dtype is {dtype}; build the model in that format"
        raise ConfigError(msg)


def is_empty(model: nn.Module) -> bool:
    """True if a parameter or a saved buffer is on torch's meta device."""
    return any(tensor.is_meta for tensor in model.state_dict(keep_vars=True).values())


def empty_model(model: nn.Module) -> None:
    """Drop the values of parameters and saved buffers: they are on torch's meta device then, and tied as before."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta:
                new = made.setdefault(id(param), torch.nn.Parameter(param.detach().to("meta"), param.requires_grad))
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = made.setdefault(id(buffer), buffer.to("meta"))
