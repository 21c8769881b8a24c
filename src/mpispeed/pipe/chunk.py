"""Layers of one virtual stage, run in order, with seeds, recomputation and passing of inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from mpispeed.pipe.layers import Function, Layer, LayerSpec, call


class Stage(Protocol):
    """Interface of a chunk to its module; settings as in `PipelineModule`."""

    parts: list[int]
    activation_checkpoint_interval: int
    activation_checkpoint_func: Callable[..., Any]
    checkpointable_layers: list[str] | None
    seed_layers: bool
    seed_fn: Callable[[int], Any]
    base_seed: int

    def get_submodule(self, target: str) -> nn.Module:
        """The module at a path."""


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` without keeping intermediate results; backward runs it again."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a chunk.

    Attributes:
        index: global index of the layer.
        name: class or function name.
        path: name of its module in the PipelineModule; "" for a function.
        function: a plain function, or the `forward_fn` of a tied layer.
        spreads: True if a tuple is passed as several arguments.
    """

    index: int
    name: str
    path: str
    function: Function | None
    spreads: bool

    @classmethod
    def of(cls, layer: Layer) -> Step:
        """The step that runs a layer."""
        if layer.tie is not None:
            return cls(layer.index, layer.name, f"tied_modules.{layer.tie.key}", layer.tie.forward_fn, layer.spreads)
        if isinstance(layer.source, nn.Module | LayerSpec):
            return cls(layer.index, layer.name, str(layer.index), None, layer.spreads)
        return cls(layer.index, layer.name, "", layer.source, layer.spreads)


class Chunk:
    """A virtual stage: chunk `index` of this rank's stage. `chunk(x)` runs its layers in order.

    Attributes:
        index: number of the chunk on this rank.
        virtual_stage: its position among all chunks of the pipeline.
        first, stop: its layers are first to stop - 1; an empty chunk hands its input on.
        is_first, is_last: True at the ends of the pipeline.
        micro_offset: number of runs so far; seeds of layers depend on it.
    """

    def __init__(self, owner: Stage, index: int, virtual_stage: int, layers: Sequence[Layer]) -> None:
        self.index, self.virtual_stage = index, virtual_stage
        self.first, self.stop = owner.parts[virtual_stage], owner.parts[virtual_stage + 1]
        self.is_first, self.is_last = virtual_stage == 0, virtual_stage == len(owner.parts) - 2
        self.micro_offset = 0
        self.steps = [Step.of(layer) for layer in layers]
        self._owner = owner

    def __call__(self, x: Any) -> Any:
        """The output of the last layer.

        A layer gets the output of the one before as one object, unless it spreads its inputs. With
        `activation_checkpoint_interval` n, each n layers that are checkpointable are recomputed in backward.
        """
        self.micro_offset += 1
        interval = self._owner.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return self._run(self.steps, self.micro_offset, x)
        for first in range(0, len(self.steps), interval):
            steps = self.steps[first : first + interval]
            run = functools.partial(self._run, steps, self.micro_offset)
            x = self._recomputed(run, x) if self.is_checkpointable(steps) else run(x)
        return x

    def is_checkpointable(self, steps: Sequence[Step]) -> bool:
        """True if these layers are recomputed: all have listed names; without a list, any has parameters."""
        listed = self._owner.checkpointable_layers
        if listed is not None:
            return all(step.name in listed for step in steps)
        modules = [self.module_of(step) for step in steps]
        return any(module is not None and next(module.parameters(), None) is not None for module in modules)

    def module_of(self, step: Step) -> nn.Module | None:
        """The module of a layer; None for a function. Looked up each time: a module may have been replaced."""
        return self._owner.get_submodule(step.path) if step.path else None

    def _run(self, steps: Sequence[Step], offset: int, x: Any) -> Any:
        owner = self._owner
        for step in steps:
            if owner.seed_layers:
                owner.seed_fn(owner.base_seed * (offset + 1) + step.index)
            module = self.module_of(step)
            if module is None:
                function = step.function
            else:
                function = module if step.function is None else functools.partial(step.function, module)
            x = call(function, x, spreads=step.spreads)  # type: ignore[arg-type]
        return x

    def _recomputed(self, run: Callable[[Any], Any], x: Any) -> Any:
        """Hand the members of a tuple over one by one: checkpoint functions look for tensors among their arguments."""
        function = self._owner.activation_checkpoint_func
        if not isinstance(x, tuple):
            return function(run, x)
        make = getattr(type(x), "_make", tuple)  # a named tuple stays one
        return function(lambda *members: run(make(members)), *x)
