"""Fault drills: hooks that call the fault injector at points of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.events import Event
from mpispeed.drill.inject import Injector, from_environment
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.step import Place

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.backward import Counters
    from mpispeed.engine.step import StepContext


def attach(context: Context) -> Hooks | None:
    """Inject the faults of MPISPEED_INJECT into the passes, updates and saves of a run.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if the text cannot be read.
    """
    injector = from_environment(context.mesh.world.comm)
    if injector is None:
        return None
    module = _first_with_weights(context.module)
    if module is not None:
        Passes(injector, context.counters).attach(module)
    # Not through the bus for the others: it swallows errors of its listeners.
    context.bus.subscribe(Event.SAVE_END, lambda event: injector.after_save(event["path"]))
    return Hooks(
        [(Place.START, BeforeUpdate(injector, context.counters))],
        before_save=injector.before_save,
        after_save=injector.free_disk,
    )


class BeforeUpdate:
    """Part of a step for faults before gradients are summed."""

    def __init__(self, injector: Injector, counters: Counters) -> None:
        self._injector, self._counters = injector, counters

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: all ranks, where a fault is one of communication."""
        self._injector.at("update", self._counters.global_steps + 1)


class Passes:
    """Hooks for faults in the middle of forward and backward passes."""

    def __init__(self, injector: Injector, counters: Counters) -> None:
        self._injector, self._counters = injector, counters

    def attach(self, module: nn.Module) -> None:
        """Watch the passes through `module`."""
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self._injector.at("forward", self._counters.global_steps + 1, module)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and module.training:
            output.register_hook(self._on_gradient)

    def _on_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        self._injector.at("backward", self._counters.global_steps + 1)
        return self._injector.gradient(grad)


def _first_with_weights(module: nn.Module) -> nn.Module | None:
    """The first module that has weights of its own to train; a stage of a pipeline may have none."""
    for each in module.modules():
        if any(param.requires_grad for param in each.parameters(recurse=False)):
            return each
    return None
