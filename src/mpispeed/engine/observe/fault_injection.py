"""Fault drills: hooks that call the fault injector at points of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.events import Event
from mpispeed.engine.state.checkpoints import Checkpoints

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.drill.inject import Injector
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.step import StepContext


def attach(parts: Parts, injector: Injector) -> None:
    """Inject faults into the passes and updates of a run, and after its saves.

    Not through the bus, which swallows errors of its listeners.
    """
    parts.updates.precede(BeforeUpdate(injector, parts.counters))
    module = _first_with_weights(parts.module)
    if module is not None:
        Passes(injector, parts.counters).attach(module)
    parts.bus.subscribe(Event.SAVE_END, lambda event: injector.after_save(event["path"]))


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


class DrilledCheckpoints(Checkpoints):
    """Checkpoints that call the injector before saves begin, and let it free the disk after them."""

    def __init__(self, parts: Parts, injector: Injector) -> None:
        super().__init__(parts)
        self._injector = injector

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """As `Checkpoints.save_checkpoint`. Collective over: all ranks."""
        self.wait_checkpoint()
        self._injector.before_save()
        try:
            return super().save_checkpoint(*args, **kwargs)
        finally:
            if not self.is_saving:
                self._injector.free_disk()

    def wait_checkpoint(self) -> None:
        """As `Checkpoints.wait_checkpoint`. Collective over: all ranks."""
        was_saving = self.is_saving
        try:
            super().wait_checkpoint()
        finally:
            if was_saving:
                self._injector.free_disk()
