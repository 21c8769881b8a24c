"""Replicated state beside the units: frozen parameters that are not sharded, and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.sharding import sharded_param

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Table


def broadcast_rest(
    model: nn.Module, table: Table, mesh: Mesh, compute: torch.dtype | None, device: torch.device
) -> None:
    """Broadcast the state that the store does not manage: frozen parameters and buffers.

    They go to `device`, and floats to `compute` if it is given.

    Collective over: the data axis.
    """
    frozen = [param for param in model.parameters() if table.locate(param) is None]
    for param in frozen:
        if sharded_param.is_sharded(param):
            with sharded_param.opened([param], "initialize"):
                whole = param.data
            sharded_param.to_unsharded(param, whole)
            sharded_param.forget(param)
    tensors: list[torch.Tensor] = [*frozen, *model.buffers()]
    for tensor in tensors:
        if compute is not None and tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor.data = tensor.data.to(compute)
        tensor.data = tensor.data.to(device).contiguous()
        mesh["data"].broadcast(tensor.data)
