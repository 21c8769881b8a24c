"""Buffers of a model from the meta device that no weight file has: rotary frequencies, masks, tables of positions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError


def remake_buffers(model: nn.Module, device: torch.device | str = "cpu") -> list[str]:
    """Give the values of a new model to the buffers on the meta device that are not saved with a model.

    For models of `transformers`, whose `_init_weights` computes them; parameters are left alone. The buffers keep their
    dtypes. Local, and alike on all ranks.

    Args:
        model: changed in place, sliced or not.
        device: where the buffers are made.

    Returns:
        names of the buffers.

    Raises:
        ConfigError: the model, or a module of it, does not compute a buffer.
    """
    made: list[str] = []
    for path, module in model.named_modules():
        own = _to_remake(module)
        if own:
            _remake(_maker(model, path), module, path, own, torch.device(device))
            made += [f"{path}.{name}" if path else name for name in own]
    return made


def remade_bytes(model: nn.Module) -> int:
    """Bytes that `remake_buffers` needs at most. Sizes of buffers come from a config, not from files of weights."""
    sizes = [sum(module.get_buffer(name).nbytes for name in _to_remake(module)) for module in model.modules()]
    return sum(sizes) + 2 * max(sizes, default=0)  # two twins of a module at once, and what fills one


def _to_remake(module: nn.Module) -> list[str]:
    """Names of a module's own buffers on the meta device that are not saved."""
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]


def _maker(model: nn.Module, path: str) -> Any:
    """The innermost model of `transformers` around a path: it knows its parts."""
    while True:
        owner = model.get_submodule(path)
        if callable(getattr(owner, "_init_weights", None)):
            return owner
        if not path:
            return None
        path = path.rpartition(".")[0]


def _remake(maker: Any, module: nn.Module, path: str, own: list[str], device: torch.device) -> None:
    twins = [_twin(module, own, fill) for fill in (0, 1)]
    with torch.no_grad():
        for twin in twins if maker is not None else ():
            maker._init_weights(twin)
    for name in own:
        first, second = (twin.get_buffer(name) for twin in twins)
        if not torch.equal(first, second):
            msg = f"the buffer {name} of {path or 'the model'} ({type(module).__name__}) has no values, is not saved "
            msg += "with weights, and no _init_weights of the model computes it; build the model with this buffer on a "
            msg += "real device, or give it its values before"
            raise ConfigError(msg)
        module._buffers[name] = first.to(device)


def _twin(module: nn.Module, own: list[str], fill: int) -> nn.Module:
    """A copy whose parameters have no values, and whose buffers to be computed are filled with one number."""
    twin: nn.Module = copy.copy(module)
    parts = {name: None if part is None else _twin(part, [], fill) for name, part in module._modules.items()}
    parameters = {name: None if param is None else _empty(param) for name, param in module._parameters.items()}
    buffers = dict(module._buffers)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype) if name in own else _empty(buffer)
    twin.__dict__ = {**module.__dict__, "_modules": parts, "_parameters": parameters, "_buffers": buffers}
    return twin


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
