"""What users hold as the optimizer: parameter groups and loss scale; the work is done by the engine's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.zero.momenta import MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.precision.scaler import LossScale


_OF_THE_SCALE = ("cur_iter", "scale_factor", "scale_window", "min_loss_scale", "last_overflow_iter")


class EngineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for schedulers and user code; `param_groups` are the engine's own dicts.

    `step` belongs to `engine.step()`, which also reduces, clips and publishes. Numbers of the loss scale can be read
    here under DeepSpeed's names. `optimizer` is the client's own optimizer, if there is one.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        scaler: LossScale,
        clear: Callable[[], None],
        name: str,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups
        self.optimizer = optimizer
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

    def step(self, closure: Any = None) -> Any:
        """Refused: call `engine.step()`."""
        msg = "optimizer.step() does nothing by itself here: call engine.step(), which reduces, clips and updates"
        raise UsageError(msg)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: flat buffers are laid out for the groups that `initialize` saw."""
        if hasattr(self, "loss_scaler"):
            msg = "parameter groups cannot be added to a running engine; pass all of them to mpispeed.initialize"
            raise UsageError(msg)
        # Torch's decorator imports its whole compiler, which takes seconds, only to keep it away from this function.
        inherited = torch.optim.Optimizer.add_param_group
        getattr(inherited, "__wrapped__", inherited)(self, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take hyper-parameters of the groups; states of parameters come with `engine.load_checkpoint`.

        Raises:
            UsageError: another number of groups.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            msg = f"the state has {len(saved)} parameter groups, the optimizer {len(self.param_groups)}"
            raise UsageError(msg)
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key not in ("params", MASK)})

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_SCALE:
            return getattr(self.loss_scaler, name)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)
