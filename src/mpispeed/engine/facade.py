"""The optimizer object that users hold: parameter groups and loss scale; the engine does the updates."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.optim.foreign import Foreign, guard
from mpispeed.sharding.momenta import MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale

log = logging.getLogger(__name__)

_OF_THE_SCALE = ("cur_iter", "scale_factor", "scale_window", "min_loss_scale", "last_overflow_iter")


class EngineOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for schedulers and user code; `param_groups` are the engine's own dicts.

    Updates are made by `engine.step()`, which also reduces and clips; `step` here raises. State of the loss scale can
    be read under DeepSpeed's names. `optimizer` is the client's own optimizer, if there is one.
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
        """Drop all gradients."""
        self._clear()

    def step(self, closure: Any = None) -> Any:
        """Raise UsageError: updates are made by `engine.step()`."""
        msg = "optimizer.step() does nothing by itself here: call engine.step(), which reduces, clips and updates"
        raise UsageError(msg)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError after construction: flat buffers are laid out for the groups given to `initialize`."""
        if hasattr(self, "loss_scaler"):
            msg = "parameter groups cannot be added to a running engine; pass all of them to mpispeed.initialize"
            raise UsageError(msg)
        # Torch's decorator imports its whole compiler, which takes seconds, only to keep it away from this function.
        inherited = torch.optim.Optimizer.add_param_group
        getattr(inherited, "__wrapped__", inherited)(self, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters of the groups; optimizer states are loaded by `engine.load_checkpoint`.

        Raises:
            UsageError: another number of groups.
        """
        _load_groups(self.param_groups, state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_SCALE:
            return getattr(self.loss_scaler, name)
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)


def _load_groups(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        msg = f"the state has {len(saved)} parameter groups, the optimizer {len(groups)}"
        raise UsageError(msg)
    if state_dict.get("state"):
        log.warning("load_state_dict of an optimizer takes hyper-parameters only; states come with load_checkpoint")
    for group, values in zip(groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key not in ("params", MASK)})


def make_handle(client: torch.optim.Optimizer, rule: Rule, clear: Callable[[], None]) -> Callable[[], None]:
    """Reduce a client's optimizer to its parameter groups and guard its methods; return a function that undoes this."""
    if isinstance(rule, Foreign):
        rule.take_step()
        return guard(client, clear)
    if any(client.state.values()):
        log.warning("the optimizer %s comes with state of earlier steps, which is dropped", type(client).__name__)
        client.state.clear()
    undo = guard(client, clear)
    # Torch's own replaces the group dicts, which the engine would not see.
    vars(client)["load_state_dict"] = partial(_load_groups, client.param_groups)

    def give_back() -> None:
        vars(client).pop("load_state_dict", None)
        undo()

    return give_back
