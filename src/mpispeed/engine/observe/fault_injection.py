"""Fault drills: hooks that call the fault injector at points of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.events import Event
from mpispeed.drill.inject import Injector, from_environment

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.backward import Counters
    from mpispeed.engine.engine import Engine
    from mpispeed.engine.step import StepContext


def attach(engine: Engine) -> None:
    """Inject the faults of MPISPEED_INJECT into this run; without it nothing is changed.

    Not through the bus, which swallows errors of its listeners.

    Raises:
        ConfigError: on every rank, if the text cannot be read.
    """
    injector = from_environment(engine.parts.mesh.world.comm)
    if injector is None:
        return
    parts = engine.parts
    parts.step_parts = (BeforeUpdate(injector, parts.counters), *parts.step_parts)
    module = _first_with_weights(parts.module)
    if module is not None:
        Passes(injector, parts.counters).attach(module)
    _wrap_saves(engine, injector)
    engine.bus.subscribe(Event.SAVE_END, lambda event: injector.after_save(event["path"]))


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


def _wrap_saves(engine: Engine, injector: Injector) -> None:
    """Call the injector before saves begin, and let it free the disk after them."""
    save, wait = engine.save_checkpoint, engine.wait_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> bool:
        """As the engine's method. Collective over: all ranks."""
        wait_checkpoint()
        injector.before_save()
        try:
            return save(*args, **kwargs)
        finally:
            if not engine.is_saving:
                injector.free_disk()

    def wait_checkpoint() -> None:
        """As the engine's method. Collective over: all ranks."""
        was_saving = engine.is_saving
        try:
            wait()
        finally:
            if was_saving:
                injector.free_disk()

    engine.__dict__["save_checkpoint"] = save_checkpoint
    engine.__dict__["wait_checkpoint"] = wait_checkpoint
