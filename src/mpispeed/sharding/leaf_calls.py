"""Leaves in backward: all of a leaf is unsharded from the gradient of its outputs to that of its inputs, on every rank.

The parameters that a rank's backward pass uses depend on its forward pass. Gradients of outputs arrive on all ranks,
also where no part of the leaf ran, and in the same order among modules: there the leaf is fetched as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.tensor_tree import map_tensors

if TYPE_CHECKING:
    from mpispeed.sharding.prefetch import Prefetcher
    from mpispeed.store.layout import Unit


class LeafCall:
    """One call of a leaf with gradients, as long as its graph lives."""

    def __init__(self, calls: LeafCalls, name: str, units: tuple[Unit, ...], inputs: Any) -> None:
        """Args: `inputs` are all arguments of the call."""
        self._calls, self.name, self.units = calls, name, units
        self.is_held = False
        self._inputs = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        self._awaited = self._missing = 0

    def end_forward(self, outputs: Any) -> Any:
        """`outputs` with hooks; inputs passed through become views, outputs without gradients depend on the inputs."""
        inputs, self._inputs = self._inputs, []
        given = {id(tensor) for tensor in inputs}
        # Where no part ran the outputs might need no gradient, although they do on the other ranks.
        is_trained = bool(inputs) or any(unit.is_trainable for unit in self.units)
        is_cut_off = is_trained and not any(tensor.requires_grad for tensor in tensors_in(outputs))

        def hooked(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                is_made_here = tensor.grad_fn is not None and id(tensor) not in given
                tensor = tensor if is_made_here else tensor.view_as(tensor)
            elif is_cut_off and tensor.is_floating_point():
                tensor = _Connected.apply(tensor, tensor.new_empty(0, requires_grad=True), *inputs)
            else:
                return tensor
            tensor.register_hook(self._begin_backward)
            return tensor

        hooks = [tensor for tensor in inputs if tensor.grad_fn is not None]
        self._awaited = len(hooks)
        for tensor in hooks:
            tensor.register_hook(self._reach_input)
        return mapped(outputs, hooked)

    def _begin_backward(self, _: torch.Tensor) -> None:
        """Collective over: the axes over which parameters are sharded at rest."""
        if not self.is_held:
            self._missing = self._awaited
            self._calls.hold(self)

    def _reach_input(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if self.is_held and not self._missing:
            self._calls.let_go((self,))


class LeafCalls:
    """The leaf calls whose backward pass is running, in `active`."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self.active: dict[int, LeafCall] = {}

    def has(self, units: tuple[Unit, ...]) -> bool:
        """True while the backward pass of a call of the leaf with these units runs."""
        return any(call.units == units for call in self.active.values())

    def hold(self, call: LeafCall) -> None:
        """Fetch the leaf for backward. Collective over: the axes over which parameters are sharded at rest."""
        self.fetch(call)
        self._prefetcher.hold(call.units)
        self.active[id(call)], call.is_held = call, True
        # Inputs without gradients have no hook that backward would reach.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.let_go((call,)))

    def fetch(self, call: LeafCall) -> None:
        """Unshard all of the leaf. Collective over: the axes over which parameters are sharded at rest."""
        if not self.has(call.units):
            self._prefetcher.unshard(call.units, is_backward=True, reader=lambda: f"the backward pass of {call.name!r}")

    def let_go(self, calls: Iterable[LeafCall]) -> None:
        """Release leaves whose backward passes are over. Local."""
        for call in calls:
            if self.active.pop(id(call), None) is not None:
                call.is_held = False
                self._prefetcher.unhold(call.units, reshards=True)

    def forget(self) -> None:
        """Release all leaves after an exception ended the backward pass."""
        self.let_go(tuple(self.active.values()))


class _Connected(torch.autograd.Function):
    """A tensor that depends on others with zero gradients, so that backward reaches them as on other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor`, which may be changed in place."""
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        """Zeros for the other inputs."""
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def mapped(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`map_tensors`, or `tree` itself if `fn` returns all of its tensors unchanged."""
    found: dict[int, torch.Tensor] = {id(tensor): fn(tensor) for tensor in tensors_in(tree)}
    if all(key == id(tensor) for key, tensor in found.items()):
        return tree
    return map_tensors(tree, lambda tensor: found[id(tensor)])
