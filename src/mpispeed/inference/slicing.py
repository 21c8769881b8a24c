"""Slicing of a model's layers over the ranks of a tensor group, for answering."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.nn.tensor import Report, inject

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm


def slice_model(
    model: nn.Module,
    comm: Comm,
    *,
    policy: Any = None,
    grain: int = 64,
    without_values: bool = False,
) -> Report | None:
    """Replace layers by slices of them; None for a group of one rank. See `mpispeed.nn.tensor.inject`.

    Collective over: `comm`.
    """
    if comm.size == 1:
        return None
    return inject(model, comm, policy, grain=grain, without_values=without_values)
