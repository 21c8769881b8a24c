"""Choice of the device that this rank computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import agree_by_texts, together

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.world import World

VARIABLE = "MPISPEED_DEVICE"
"""Environment variable: cpu, cuda, cuda:1, or another device of torch; default: cuda if torch sees a GPU, else cpu."""


def choose_device(world: World, model: nn.Module) -> torch.device:
    """Choose this rank's device and make it the current one; ranks of a node take the node's devices in turn.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a device is not available, or kinds of devices differ between ranks.
    """
    with together(agree_by_texts(world.comm.gather_objects), ConfigError):
        device = _usable_device(world.local_rank, model)
    found = world.comm.gather_objects(device.type)
    kinds = {kind: rank for rank, kind in reversed(list(enumerate(found)))}
    if len(kinds) > 1:
        shown = ", ".join(f"rank {rank} {kind}" for kind, rank in sorted(kinds.items(), key=lambda item: item[1]))
        msg = f"ranks would compute on different kinds of devices ({shown}); set {VARIABLE} to one of them on all ranks"
        raise ConfigError(msg)
    if device.type != "cpu":
        devices.module_of(device).set_device(device)
        devices.use(device)
    return device


def _usable_device(local_rank: int, model: nn.Module) -> torch.device:
    device = devices.HOST
    try:
        device = _own_device(local_rank)
        _check_model(model, device)
    except RuntimeError as error:  # of the driver: the device is in exclusive use, or has no memory left
        lines = str(error).strip().splitlines() or [type(error).__name__]
        msg = (
            f"{device} cannot be used: {lines[0]}; several ranks may need a device that is not in exclusive mode. Look "
            f"at it with nvidia-smi, or set {VARIABLE}"
        )
        raise ConfigError(msg) from error
    return device


def _own_device(local_rank: int) -> torch.device:
    text = os.environ.get(VARIABLE, "")
    if not text:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
        count = 1 if device.type == "cpu" else int(devices.module_of(device).device_count())
    except (RuntimeError, AttributeError, ValueError) as error:
        msg = f"{VARIABLE} is {text!r}, which this torch does not know ({error}); use cpu, cuda or cuda:N"
        raise ConfigError(msg) from error
    if device.type == "cpu":
        return devices.HOST
    if device.type == "meta" or not count or (device.index is not None and device.index >= count):
        msg = f"{VARIABLE} is {text!r}, and torch sees {count} such devices here; use another one, or cpu"
        raise ConfigError(msg)
    return torch.device(device.type, local_rank % count if device.index is None else device.index)


def _check_model(model: nn.Module, device: torch.device) -> None:
    """Check that the model's data can be moved to `device` in place.

    Raises:
        ConfigError: they cannot; torch allows this between some kinds of devices only.
    """
    probe = torch.empty(0, device=device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type not in (device.type, "meta") and not torch._has_compatible_shallow_copy_type(
            torch.empty(0, device=tensor.device), probe
        ):
            msg = (
                f"{name} is on {tensor.device} and cannot be moved to {device} in place; call model.to('{device}') "
                "before you make the optimizer and call initialize"
            )
            raise ConfigError(msg)
