"""Stand-in for the hooks that libraries take off a ZeRO-3 engine of DeepSpeed around `generate`: there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class _NoModule(nn.Module):
    """A module without parameters."""

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """No parameters."""
        return iter(())


class ParameterOffload:
    """`engine.optimizer.parameter_offload`, with the lists and calls that trl uses, all of them empty.

    Inside of `GatheredParameters` the model runs with its hooks in place: they find the parameters gathered.

    Attributes:
        module: a module without parameters, whose hooks and marks can be removed.
        forward_hooks: none.
        backward_hooks: none.
        param_coordinator: this object; it never holds a trace.
    """

    def __init__(self) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = self

    def is_invalid_trace(self) -> bool:
        """True: there is none."""
        return True

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing was taken off."""
