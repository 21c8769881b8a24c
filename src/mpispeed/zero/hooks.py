"""The only place that installs hooks on parameters and modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.store.layout import Entry
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.grads import GradStore


class GradHooks:
    """Carries every finished gradient from autograd to a `GradStore` and clears `param.grad`.

    The model does not keep the store alive: when that is gone, gradients stay with their parameters.
    """

    def __init__(self, table: Table, grads: GradStore, landed: Callable[[Unit], None] | None = None) -> None:
        """Args: `landed` is told about units all of whose gradients have arrived."""
        store = weakref.ref(grads)
        self._handles = [
            param.register_post_accumulate_grad_hook(_carrier(store, place.unit, place.entry, landed))
            for param, place in table.places()
        ]

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _carrier(
    store: weakref.ref[GradStore], unit: Unit, entry: Entry, landed: Callable[[Unit], None] | None
) -> Callable[[torch.Tensor], None]:
    def carry(param: torch.Tensor) -> None:
        grads, grad = store(), param.grad
        if grads is not None and grad is not None:
            param.grad = None  # first: a gradient that is refused must not be added to the next one
            grads.land(unit, entry, grad)
            if landed is not None and grads.has_landed(unit):
                landed(unit)

    return carry
