"""The optimizer objects that users hold: parameter groups, loss scale and states; the engine does the updates."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.optim.foreign import Foreign, guard
from mpispeed.optim.rule import LR_FACTOR, MASK
from mpispeed.optim.torch_rule import TorchRule
from mpispeed.sharding.local_states import local_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.engine.backward import Counters
    from mpispeed.optim.rule import Rule
    from mpispeed.precision.scaler import LossScale

log = logging.getLogger(__name__)

_OF_THE_SCALE = ("cur_iter", "scale_factor", "scale_window", "min_loss_scale", "last_overflow_iter")


class StepLink:
    """Call from `step()` of an optimizer to the engine that uses it, which is held weakly."""

    def __init__(self) -> None:
        self._settle: weakref.WeakMethod[Callable[[], None]] | None = None
        self._method: weakref.WeakMethod[Callable[[], None]] | None = None

    def attach(self, method: Callable[[], None], settle: Callable[[], None]) -> None:
        """Call `method` from now on; `settle` before what depends on the outcome of the last step is read."""
        self._method, self._settle = weakref.WeakMethod(method), weakref.WeakMethod(settle)

    def settle(self) -> None:
        """Learn how the last step ended. May wait for the device."""
        if self._settle is not None and (settle := self._settle()) is not None:
            settle()

    def step(self, closure: Any = None) -> None:
        """Update, as `engine.step()` at a boundary.

        Collective over: the data axis.

        Raises:
            UsageError: a closure is given, or the engine is gone.
        """
        method = None if self._method is None else self._method()
        if closure is not None:
            msg = "optimizer.step(closure): the engine runs backward passes, no closure can; call step() without it"
            raise UsageError(msg)
        if method is None:
            msg = "optimizer.step(): the engine that made the updates is gone; keep what mpispeed.initialize returns"
            raise UsageError(msg)
        method()


class LocalStates(Mapping[nn.Parameter, dict[str, Any]]):
    """Parameter -> its optimizer states on this rank, as `optimizer.state`; to change them there is `safe_set_*`."""

    def __init__(self, groups: list[dict[str, Any]], counters: Counters) -> None:
        self._groups, self._counters = groups, counters

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        if not self._counters.update_count or param not in set(self):
            raise KeyError(param)
        return {"step": self._counters.update_count, **local_states(param)}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for group in self._groups for param in group["params"] if self._counters.update_count)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _SettledGroups(torch.optim.Optimizer):
    """An optimizer whose groups are read after the outcome of the last step is known."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The engine's own dicts, as the last step has left them. May wait for the device."""
        own = vars(self)
        link = own.get("_link")  # torch's constructor asks before there is one
        if link is not None:
            link.settle()
        groups: list[dict[str, Any]] = own["_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["_groups"] = groups


class InnerOptimizer(_SettledGroups):
    """`engine.optimizer.optimizer` of an optimizer that was named in the config.

    `param_groups` are the engine's own dicts, `state` shows this rank's part of the states, flat where it is a part.
    """

    def __init__(
        self, groups: list[dict[str, Any]], counters: Counters, link: StepLink, clear: Callable[[], None]
    ) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.param_groups, self._link, self._clear = groups, link, clear
        self.defaults = {k: v for k, v in groups[0].items() if k != "params"} if groups else {}
        self._states = LocalStates(groups, counters)

    @property  # type: ignore[override]
    def state(self) -> LocalStates:
        """States of the parameters; empty before the first update."""
        return self._states

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if states:
            msg = "states of this optimizer are written with mpispeed.zero.safe_set_full_optimizer_state(param, ...)"
            raise UsageError(msg)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update, as `engine.step()` at a boundary.

        Collective over: the data axis.
        """
        self._link.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError after construction: flat buffers are laid out for the groups given to `initialize`."""
        _add_group(self, param_group, is_made=hasattr(self, "_link"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyper-parameters of the groups; optimizer states are loaded by `engine.load_checkpoint`.

        Raises:
            UsageError: another number of groups.
        """
        _load_groups(self.param_groups, state_dict)


class EngineOptimizer(_SettledGroups):
    """A `torch.optim.Optimizer` for schedulers and user code; `param_groups` are the engine's own dicts.

    Updates are made by the engine, which also reduces and clips; `step` is `engine.step()` at a boundary. State of the
    loss scale can be read under DeepSpeed's names. `optimizer` is the client's own optimizer, or an `InnerOptimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        scaler: LossScale,
        clear: Callable[[], None],
        name: str,
        link: StepLink,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups
        self.optimizer = optimizer
        self.defaults = {k: v for k, v in groups[0].items() if k != "params"} if groups else {}
        self.loss_scaler = scaler
        self._overflow = False
        self.name = name
        self._link, self._clear = link, clear

    @property
    def overflow(self) -> bool:
        """True if gradients of the last step were not finite. May wait for the device."""
        self._link.settle()
        return self._overflow

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._overflow = value

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
        """Give every group the same learning rate, times the factor that muP gives it."""
        for group in self.param_groups:
            group["lr"] = lr * group.get(LR_FACTOR, 1.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._clear()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update, as `engine.step()` at a boundary, from the gradients of all backward passes since the last update.

        Collective over: the data axis.

        Raises:
            UsageError: a closure is given, the engine is gone, or as for `engine.step()`.
        """
        self._link.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError after construction: flat buffers are laid out for the groups given to `initialize`."""
        _add_group(self, param_group, is_made=hasattr(self, "loss_scaler"))

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


def _add_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, is_made: bool) -> None:
    if is_made:
        msg = "parameter groups cannot be added to a running engine; pass all of them to mpispeed.initialize"
        raise UsageError(msg)
    # Torch's decorator imports its whole compiler, which takes seconds, only to keep it away from this function.
    inherited = torch.optim.Optimizer.add_param_group
    getattr(inherited, "__wrapped__", inherited)(optimizer, group)


def _load_groups(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        msg = f"the state has {len(saved)} parameter groups, the optimizer {len(groups)}"
        raise UsageError(msg)
    if state_dict.get("state"):
        log.warning("load_state_dict of an optimizer takes hyper-parameters only; states come with load_checkpoint")
    for group, values in zip(groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key not in ("params", MASK)})


def make_handle(
    client: torch.optim.Optimizer, rule: Rule, clear: Callable[[], None], link: StepLink, counters: Counters
) -> Callable[[], None]:
    """Reduce a client's optimizer to its parameter groups and guard its methods; return a function that undoes this.

    The `state` of one of torch, whose states are in files, shows them as that of an `InnerOptimizer`.
    """
    given = ["parameter_offload", "averaged_gradients"]
    if isinstance(rule, Foreign):
        rule.take_step()
    elif any(client.state.values()):
        log.warning("the optimizer %s comes with state of earlier steps, which is dropped", type(client).__name__)
        client.state.clear()
    undo = guard(client, clear, link.step)
    if not isinstance(rule, Foreign):
        # Torch's own replaces the group dicts, which the engine would not see.
        vars(client)["load_state_dict"] = partial(_load_groups, client.param_groups)
        given.append("load_state_dict")
    before = client.state
    is_shown = isinstance(rule, TorchRule)
    if is_shown:
        client.state = LocalStates(client.param_groups, counters)  # type: ignore[assignment]

    def give_back() -> None:
        for name in given:
            vars(client).pop(name, None)
        if is_shown:
            client.state = before
        undo()

    return give_back
