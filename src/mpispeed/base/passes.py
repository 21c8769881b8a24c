"""The forward pass that runs: for decisions by the number of a micro-batch, also when backward runs it again.

A function that activation checkpointing runs again in backward has to decide as in its first run. By then another
forward pass may have begun: pipelines have several micro-batches under way, and scripts may call the model twice before
a backward pass. So the outputs of a pass are marked with it: backward reaches them before anything inside of the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mpispeed.base.tensor_tree import tensors


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass of one micro-batch.

    Attributes:
        global_step: global batches that were finished before.
        micro_step: number of the micro-batch in its global batch, from 0.
        is_training: False for evaluation.
        slot: number of the micro-batch among those of all ranks, where that says what is drawn for it; else None.
    """

    global_step: int = 0
    micro_step: int = 0
    is_training: bool = True
    slot: int | None = None


class Passes:
    """The passes of one model. They are the same on all ranks of the data, model and pipe axes.

    Attributes:
        listeners: called with each pass that begins.
        is_watched: somebody asks for `current`; else outputs are not marked.
    """

    def __init__(self) -> None:
        """No pass has begun."""
        self.listeners: list[Callable[[Pass], None]] = []
        self.is_watched = False
        self._forward, self._backward = Pass(), Pass()

    @property
    def current(self) -> Pass:
        """The pass that runs now, or ran last; within backward that whose gradients are computed."""
        return self._backward if torch._C._current_graph_task_id() != -1 else self._forward

    def begin(self, begun: Pass) -> None:
        """Begin a forward pass. Local."""
        self._forward = self._backward = begun
        for listener in self.listeners:
            listener(begun)

    def end(self, outputs: Any) -> None:
        """End the forward pass that began last, with its outputs: tensors in lists, tuples and dicts. Local."""
        if not self.is_watched or not torch.is_grad_enabled():
            return
        # Weak: autograd holds hooks where the garbage collector does not look.
        own, ended = weakref.ref(self), self._forward

        def reached(_: torch.Tensor) -> None:
            if (passes := own()) is not None:
                passes._backward = ended

        for tensor in tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]
