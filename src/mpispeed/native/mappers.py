"""Kinds of devices whose memory several processes can map, with the way of each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpispeed.base.errors import NativeMissing
from mpispeed.native.cuda.mapped_memory import CudaMapper
from mpispeed.native.mapped_memory import Mapper

KINDS: dict[str, Callable[[torch.device], Mapper]] = {"cuda": CudaMapper}
"""By the type of the device; an entry raises NativeMissing where it cannot be used."""


def mapper_for(device: torch.device) -> Mapper:
    """A mapper of memory of `device`.

    Raises:
        NativeMissing: memory of such devices cannot be shared between processes; says why.
    """
    if device.type not in KINDS:
        msg = f"memory of {device.type!r} devices cannot be mapped by other processes"
        raise NativeMissing(msg)
    return KINDS[device.type](device)
