"""Updates by gradients of embeddings that hold only the rows that were used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.flat import Terms
from mpispeed.native.multi_tensor_host import HostTable, Row


def has_rows(grad: Tensor) -> bool:
    """True for a gradient that is a list of rows, as of an embedding with `sparse=True`."""
    return grad.layout == torch.sparse_coo and grad.sparse_dim() == 1


def update_rows(
    param: Tensor,
    state: Mapping[str, Any],
    names: tuple[str, ...],
    grad: Tensor,
    terms: Terms,
    make_table: Callable[[list[Row]], HostTable | DeviceTable],
    threads: int,
) -> None:
    """Update the rows of `param` and of its states that a gradient has; the others stay.

    This is the whole update for a rule that changes nothing where the gradient is 0.

    Args:
        param: of the shape of `grad`.
        state: of the parameter.
        names: of the tensors in it.
        grad: rows, in any order, also several times.
        terms: of this update.
        make_table: makes a table of one row of tensors.
        threads: of the host.

    Shapes: param [rows, ...]
    """
    grad = grad.coalesce()
    rows = grad.indices()[0]
    if not rows.numel():
        return
    part, kept = param.detach()[rows], tuple(state[name][rows] for name in names)
    table = make_table([Row(part, kept, grad.values().contiguous(), None)])
    if isinstance(table, HostTable):
        table.run([terms], threads=threads)
    else:
        table.run([terms], scales=[None])
    param.detach().index_copy_(0, rows, part)
    for name, values in zip(names, kept, strict=True):
        state[name].index_copy_(0, rows, values)
