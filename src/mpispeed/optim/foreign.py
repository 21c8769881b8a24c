"""Any `torch.optim.Optimizer` as a rule: its parameters are the windows of the masters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.torch_names import why_unusable
from mpispeed.optim.rule import Scalar, Window, check_keywords, key_text

logger = logging.getLogger(__name__)

_ELEMENTWISE: dict[type[torch.optim.Optimizer], bool] = {
    torch.optim.ASGD: True,
    torch.optim.Adadelta: True,
    torch.optim.Adagrad: True,
    torch.optim.Adam: True,
    torch.optim.AdamW: True,
    torch.optim.Adamax: True,
    torch.optim.NAdam: True,
    torch.optim.RAdam: True,
    torch.optim.RMSprop: True,
    torch.optim.Rprop: True,
    torch.optim.SGD: True,
    torch.optim.LBFGS: False,
    torch.optim.SparseAdam: False,
}
for _name in ("Adafactor", "Muon"):  # not in every supported torch
    if hasattr(torch.optim, _name):
        _ELEMENTWISE[getattr(torch.optim, _name)] = False


def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool | None:
    """True if `cls` gives the same result on any range of a flattened parameter, False if not, None if unknown.

    Only the exact classes of torch are known, since a subclass may do anything, and classes that say that they are not.
    """
    found = _ELEMENTWISE.get(cls)
    return False if found is None and getattr(cls, "needs_whole_tensors", False) else found


def split_state(state: Mapping[str, Any], like: Tensor) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """The optimizer state of one parameter as flat slots and the rest.

    A slot is a tensor of the shape of `like`, flattened (a view where it is contiguous). The rest are None, numbers,
    texts and copies of tensors of other shapes, or of another dtype where they have one element.

    Raises:
        UsageError: an entry is of another type, so that it cannot be stored without pickle.
    """
    slots: dict[str, Tensor] = {}
    scalars: dict[str, Scalar] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            is_slot = value.dim() and value.shape == like.shape and (value.numel() != 1 or value.dtype == like.dtype)
            if is_slot:
                slots[name] = value.detach().reshape(-1)
            else:
                scalars[name] = value.detach().clone()
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[name] = value
        else:
            msg = f"optimizer state {name!r} is a {type(value).__name__}; only tensors, numbers and texts can be stored"
            raise UsageError(msg)
    return slots, scalars


def guard(
    optimizer: torch.optim.Optimizer, clear: Callable[[], None], step: Callable[[Any], None]
) -> Callable[[], None]:
    """Redirect `step` and `zero_grad` of an object that the user still holds, because the gradients are elsewhere.

    Args:
        optimizer: the object, which is changed.
        clear: what `zero_grad` calls.
        step: what `step` calls, with its closure.

    Returns:
        A function that undoes it.
    """

    def redirected(_: torch.optim.Optimizer, closure: Any = None) -> None:
        step(closure)

    redirected._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    before: dict[str, Any] = {name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)}
    # A method, with torch's mark, so that schedulers neither wrap it nor take it for an override of their own.
    vars(optimizer).update(step=MethodType(redirected, optimizer), zero_grad=lambda set_to_none=True: clear())

    def undo() -> None:
        for name in ("step", "zero_grad"):
            vars(optimizer).pop(name, None)
        vars(optimizer).update(before)

    return undo


class Foreign:
    """A rule around a torch optimizer, which keeps its state itself (see `KeepsState`).

    Given a class, the optimizer is made here and follows the hyper-parameters of the windows' groups.
    Given a client's object, the object and the dicts in its `param_groups` stay the same, so that holders of them (an
    lr scheduler) keep their effect; they decide, and `Window.group` is read only if it is that dict. The first window
    replaces the parameters of all groups by windows.

    Every window is one parameter, of its full shape when `Window.shape` is set, flat otherwise; its
    group is `key[1]`. One update is one `step()` over all given windows, so all of them have to stay in
    place until `update` returns. Gradients of the master's dtype are scaled in place.

    `SparseAdam`, which takes rows, gets those that are not all zero: after the sum over ranks, the rows that any rank
    used. A parameter without such a row gets no gradient.
    """

    state_names: tuple[str, ...] = ()
    wants_whole = True

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        _refuse_unusable(cls)
        self.name = cls.__name__
        self.is_elementwise = is_elementwise(cls)
        self.kinds = frozenset(base.__name__ for base in cls.__mro__)  # names of what its state is that of
        self.is_client = not isinstance(optimizer, type)
        self._takes_rows = issubclass(cls, torch.optim.SparseAdam)
        self.optimizer = make_empty(optimizer, dict(params or {})) if isinstance(optimizer, type) else optimizer
        self.defaults: dict[str, Any] = dict(self.optimizer.defaults)
        self._step: Callable[[], Any] = self.optimizer.step
        self._bound: dict[tuple[Any, ...], nn.Parameter] = {}

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Run one `step()` over all `windows`, with their gradients times `grad_scale`; then fill `out`, call `after`.

        The number of threads is that of torch; `threads` is not used.

        Raises:
            ConfigError: the optimizer needs full parameters and a window is a part.
            UsageError: a window does not fit the earlier one of its key.
        """
        del threads
        held = [window for window in windows if window.master.numel()]
        parameters = [self._bind(window) for window in held]
        try:
            for window, parameter in zip(held, parameters, strict=True):
                grad = _scaled(window, grad_scale).view_as(parameter)
                parameter.grad = _rows_of(grad) if self._takes_rows else grad
            self._step()
            self.optimizer._opt_called = True  # type: ignore[attr-defined] # as torch's schedulers want to see
        finally:
            for parameter in parameters:
                parameter.grad = None
        for window in held:
            if window.out is not None:
                window.out.copy_(window.master)
            if window.after is not None:
                window.after()

    def take_step(self) -> None:
        """Keep the object's `step` for updates, as a scheduler may have wrapped it; before `guard` replaces it."""
        self._step = self.optimizer.step

    def forget(self) -> None:
        """Drop the state of all windows, as before the first update."""
        for key, parameter in self._bound.items():
            self.optimizer.state.pop(parameter, None)
            begin_state(self.optimizer, parameter, self.optimizer.param_groups[int(key[1]) if len(key) > 1 else 0])

    def slots(self, key: tuple[Any, ...]) -> dict[str, Tensor]:
        """One flat tensor of the window's length per elementwise state; empty before the first update."""
        return self._split(key)[0]

    def window_scalars(self, key: tuple[Any, ...]) -> dict[str, Scalar]:
        """The rest of the window's state: step counts, products, factors of other shapes."""
        return self._split(key)[1]

    def restore(self, window: Window, slots: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Set the state of `window`, over entries of the same names; tensors are copied.

        Slots get the dtype of the window's master, the rest keep theirs.

        Raises:
            UsageError: a slot has another length than the window.
        """
        if not window.master.numel():
            return
        parameter = self._bind(window)
        state = self.optimizer.state[parameter]
        for name, values in slots.items():
            if values.numel() != parameter.numel():
                msg = (
                    f"slot {name!r} for window {key_text(window.key)} of optimizer {self.name} has {values.numel()} "
                    f"elements, the window has {parameter.numel()}; cut the slot as the window is cut"
                )
                raise UsageError(msg)
            state[name] = values.detach().to(parameter, copy=True).view_as(parameter)
        group = self._group(window)
        for name, value in scalars.items():
            # As where torch loads a state: counts stay on the host unless kernels on the device read them.
            is_here = name != "step" or bool(group.get("capturable") or group.get("fused"))
            device = parameter.device if is_here else HOST
            state[name] = value.detach().to(device, copy=True) if isinstance(value, Tensor) else value

    def scalars(self) -> dict[str, Any]:
        """Nothing: all state is that of windows."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Do nothing."""

    def _split(self, key: tuple[Any, ...]) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        parameter = self._bound.get(key)
        if parameter is None or parameter not in self.optimizer.state:
            return {}, {}
        return split_state(self.optimizer.state[parameter], parameter)

    def _bind(self, window: Window) -> nn.Parameter:
        """The parameter that stands for `window`, made when its key is new, with the window's memory as data."""
        group = self._group(window)
        is_flat = not window.shape  # 0-dim parameters are flat too: their slots must differ from step counts
        if is_flat and window.shape is None and self.is_elementwise is False:
            msg = (
                f"the optimizer {self.name} needs whole parameters, but window {key_text(window.key)} is a cut of "
                "one; choose settings that keep masters whole, or an elementwise optimizer such as AdamW"
            )
            raise ConfigError(msg)
        data = window.master.view(window.shape or -1)
        parameter = self._bound.get(window.key)
        if parameter is None:
            parameter = self._bound[window.key] = nn.Parameter(data)
            group["params"].append(parameter)
            begin_state(self.optimizer, parameter, group)
        elif parameter.shape != data.shape:
            msg = (
                f"window {key_text(window.key)} of optimizer {self.name} had shape {tuple(parameter.shape)} and has "
                f"{tuple(data.shape)} now; a key must stand for the same range all the time"
            )
            raise UsageError(msg)
        parameter.data = data
        return parameter

    def _group(self, window: Window) -> dict[str, Any]:
        """The optimizer's group for `window`, with the window's hyper-parameters if they lead."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        index = int(window.key[1]) if len(window.key) > 1 else 0
        if self.is_client:
            if not self._bound:
                self._take_over()
            if index >= len(groups):
                msg = f"window {key_text(window.key)} names group {index}, the optimizer {self.name} has {len(groups)}"
                raise UsageError(msg)
            return groups[index]
        while len(groups) <= index:
            groups.append({**self.defaults, "params": []})
        groups[index].update({name: value for name, value in window.group.items() if name != "params"})
        return groups[index]

    def _take_over(self) -> None:
        """Empty the groups of a client's optimizer, whose parameters windows replace from now on."""
        states = self.optimizer.state.values()
        # Adagrad has state from its construction on, which is of no account before its first step.
        if any(state and float(state.get("step", 1)) > 0 for state in states):
            logger.warning(
                "the optimizer %s comes with state of earlier steps; what was not restored into windows is dropped",
                self.name,
            )
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []


def make_empty(cls: type[torch.optim.Optimizer], params: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer without parameters; a stand-in lets the constructor check the keywords and set its defaults.

    Raises:
        ConfigError: it does not take the keywords `params`.
    """
    check_keywords(cls, params, f"the optimizer {cls.__name__}", skip=1)
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    try:
        optimizer = cls([nn.Parameter(torch.zeros(1, 1))], **params)  # type: ignore[call-arg,unused-ignore]
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"torch refuses the params {params} of the optimizer {cls.__name__}: {error}"
        raise ConfigError(msg) from error
    optimizer.defaults = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    optimizer.param_groups.clear()
    optimizer.state.clear()
    return optimizer


def begin_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
    """Make the state that a parameter must have before its first step: only Adagrad's, filled where it is made."""
    if isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "sum": torch.full_like(parameter.data, group["initial_accumulator_value"]),
        }


def _refuse_unusable(cls: type[torch.optim.Optimizer]) -> None:
    why = why_unusable(cls)
    if why:
        msg = f"the optimizer {cls.__name__} cannot be used: {why}; choose another, such as AdamW"
        raise ConfigError(msg)


def _scaled(window: Window, grad_scale: float) -> Tensor:
    """The gradient in the master's dtype, times `grad_scale`; in place where the dtype allows it."""
    grad = window.grad.to(window.master.dtype)
    return grad if grad_scale == 1.0 else grad.mul_(grad_scale)


def _rows_of(grad: Tensor) -> Tensor | None:
    """The rows of a gradient that are not all zero, as a sparse tensor; None if there are none."""
    rows = grad.to_sparse(1)
    return rows if rows.values().numel() else None
