"""Replicated state beside the units: frozen parameters that are not sharded, and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.sharding import sharded_param

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mpispeed.mesh.mesh import Axes, Mesh
    from mpispeed.store.layout import Table


def broadcast_rest(
    model: nn.Module,
    table: Table,
    mesh: Mesh,
    compute: torch.dtype | None,
    device: torch.device,
    alike: Mapping[int, Axes] | None = None,
    kept: Collection[int] = (),
) -> None:
    """Broadcast the state that the store does not manage: frozen parameters and buffers.

    They go to `device`, and floats to `compute` if it is given. `alike`: axes along which ranks have equal values, by
    `id` of the parameter; the data axis for others.

    Collective over: the data axis.
    """
    frozen = [param for param in model.parameters() if table.locate(param) is None]
    for param in frozen:
        if sharded_param.is_sharded(param):
            with sharded_param.opened([param], "initialize"):
                whole = param.data
            sharded_param.to_unsharded(param, whole)
            sharded_param.forget(param)
    axes = alike or {}
    tensors: list[torch.Tensor] = [*frozen, *model.buffers()]
    for tensor in tensors:
        if (
            compute is not None
            and id(tensor) not in kept
            and tensor.is_floating_point()
            and tensor.dtype != torch.float64
        ):
            tensor.data = tensor.data.to(compute)
        tensor.data = tensor.data.to(device).contiguous()
        mesh[axes.get(id(tensor), "data")].broadcast(tensor.data)
