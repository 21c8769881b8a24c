"""What users hold as the optimizer: parameter groups and loss scale; the work is done by the engine's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.precision.scaler import LossScale


class EngineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for schedulers and user code; `param_groups` are the engine's own dicts.

    `step` belongs to `engine.step()`, which also reduces, clips and publishes.
    """

    def __init__(self, groups: list[dict[str, Any]], scaler: LossScale, clear: Callable[[], None], name: str) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups
        self.defaults = {k: v for k, v in groups[0].items() if k != "params"} if groups else {}
        self.loss_scaler = scaler
        self.overflow = False
        self.name = name
        self._clear = clear

    @property
    def loss_scale(self) -> float:
        """The scale the next backward uses."""
        return self.loss_scaler.scale

    @property
    def cur_scale(self) -> float:
        """The scale the next backward uses."""
        return self.loss_scaler.scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the scale follows overflows."""
        return self.loss_scaler.dynamic

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Give every group the same learning rate."""
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._clear()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Refused: call `engine.step()`."""
        msg = "optimizer.step() does nothing by itself here: call engine.step(), which reduces, clips and updates"
        raise UsageError(msg)
