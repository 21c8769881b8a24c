"""The only place that installs hooks on parameters and modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.store.table import Table
    from mpispeed.zero.grads import GradStore


class GradHooks:
    """Carries every finished gradient from autograd to a `GradStore` and clears `param.grad`."""

    def __init__(self, table: Table, grads: GradStore) -> None:
        self._handles = [
            param.register_post_accumulate_grad_hook(_carrier(grads, place.unit, place.entry))
            for param, place in table.places()
        ]

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _carrier(grads: GradStore, unit: object, entry: object) -> Callable[[torch.Tensor], None]:
    def carry(param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None:
            grads.land(unit, entry, grad.to_dense() if grad.layout != torch.strided else grad)  # type: ignore[arg-type]
            param.grad = None

    return carry
