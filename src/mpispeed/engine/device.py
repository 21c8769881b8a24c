"""Which device this rank computes on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mpispeed.base import device as devices
from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_ranks
from mpispeed.mesh.staging import POINTERS, takes_pointers

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.world import World

VARIABLE = "MPISPEED_DEVICE"
"""cpu, cuda, cuda:1, or another type of device that torch knows; by default cuda where torch sees a GPU, else cpu."""


def choose_device(world: World, model: nn.Module) -> torch.device:
    """The device of this rank, which becomes the current one: ranks of a node take those of the node in turn.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if one cannot have what is asked for, or they would compute on different kinds.
    """
    problem, device = "", devices.HOST
    try:
        device = _own_device(world.local_rank)
        _check_model(model, device)
    except ConfigError as error:
        problem = str(error)
    except RuntimeError as error:  # of the driver: the device is used by others alone, or has no memory left
        problem = (
            f"{device} cannot be used: {str(error).strip().splitlines()[0]}; several ranks may need a device that is "
            f"not in exclusive mode. Look at it with nvidia-smi, or set {VARIABLE}"
        )
    found = world.comm.gather_objects((problem, device.type, takes_pointers()))
    failed = [(rank, text) for rank, (text, *_) in enumerate(found) if text]
    if failed:
        msg = failed[0][1] + (f" (on rank {failed[0][0]})" if len(failed) < len(found) else "")
        raise ConfigError(msg)
    kinds = {kind: rank for rank, (_, kind, _) in reversed(list(enumerate(found)))}
    if len(kinds) > 1:
        shown = ", ".join(f"rank {rank} {kind}" for kind, rank in sorted(kinds.items(), key=lambda item: item[1]))
        msg = f"ranks would compute on different kinds of devices ({shown}); set {VARIABLE} to one of them on all ranks"
        raise ConfigError(msg)
    if len({pointers for *_, pointers in found}) > 1:
        which = format_ranks([rank for rank, (*_, pointers) in enumerate(found) if pointers])
        msg = f"{POINTERS} is 1 on {which} only; messages would not match. Set it on all ranks or on none"
        raise ConfigError(msg)
    if device.type != "cpu":
        devices.module_of(device).set_device(device)
        devices.use(device)
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
    """Data of a parameter can be moved between some kinds of devices only.

    Raises:
        ConfigError: not from where the model is to `device`.
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
