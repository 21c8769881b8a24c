"""Hooks of parameters that carry finished gradients from autograd to a `GradStore`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mpispeed.sharding.grads import GradStore
    from mpispeed.store.table import Table, Unit


class GradHooks:
    """Post-accumulate hooks that hand every finished gradient to a `GradStore` and clear `param.grad`.

    Hooks keep neither this object nor the store alive: once one is gone, gradients stay with their parameters.
    """

    def __init__(self, table: Table, grads: GradStore, landed: Callable[[Unit], None] | None = None) -> None:
        """Args: `landed` is called with each unit whose gradients have all arrived."""
        self._table, self._store, self._landed = table, weakref.ref(grads), landed
        self._expect: Callable[[], Callable[[], None] | None] = lambda: None
        # Weak: the garbage collector does not see that autograd holds hooks, and could never collect what they hold.
        own = weakref.WeakMethod(self._carry)

        def hook(param: torch.Tensor) -> None:
            if (carry := own()) is not None:
                carry(param)

        self._handles = [param.register_post_accumulate_grad_hook(hook) for param, _ in table.places()]

    def deliver(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Hand on a gradient that autograd did not put into `param.grad`; nothing if `param` is not trained here."""
        grads, place = self._store(), self._table.find(param)
        if grads is None or place is None:
            return
        grads.land(place.unit, place.entry, grad)
        if self._landed is not None and grads.has_landed(place.unit):
            self._landed(place.unit)

    def listen(self, expect: Callable[[], None]) -> None:
        """Call the method `expect` before each gradient that autograd brings, as long as its object lives."""
        self._expect = weakref.WeakMethod(expect)

    def remove(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _carry(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is not None and self._store() is not None:
            param.grad = None  # first: a gradient that is refused must not be added to the next one
            if (expect := self._expect()) is not None:
                expect()
            self.deliver(param, grad)
