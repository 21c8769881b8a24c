"""The only place that installs hooks on parameters and modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.grads import GradStore


class GradHooks:
    """Carries every finished gradient from autograd to a `GradStore` and clears `param.grad`.

    The model does not keep the store alive: when that is gone, gradients stay with their parameters.
    """

    def __init__(self, table: Table, grads: GradStore, landed: Callable[[Unit], None] | None = None) -> None:
        """Args: `landed` is told about units all of whose gradients have arrived."""
        self._table, self._store, self._landed = table, weakref.ref(grads), landed
        self._handles = [param.register_post_accumulate_grad_hook(self._carry) for param, _ in table.places()]

    def deliver(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Hand on a gradient that autograd did not put into `param.grad`; nothing if `param` is not trained here."""
        grads, place = self._store(), self._table.find(param)
        if grads is None or place is None:
            return
        grads.land(place.unit, place.entry, grad)
        if self._landed is not None and grads.has_landed(place.unit):
            self._landed(place.unit)

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _carry(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None and self._store() is not None:
            param.grad = None  # first: a gradient that is refused must not be added to the next one
            self.deliver(param, grad)
