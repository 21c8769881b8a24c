"""Elementwise optimizers of torch over flat windows whose states come with them, so that files may hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.base.device import HOST
from mpispeed.base.errors import ConfigError
from mpispeed.optim.foreign import Foreign, begin_state, is_elementwise, make_empty
from mpispeed.optim.rule import Scalar, Window

_PROBE = {"lr": 1e-3, "capturable": False, "differentiable": False, "foreach": None, "fused": None}
"""Settings that do not change which states there are, and may not work on a small tensor in host memory."""


@dataclass(slots=True)
class _Shared:
    """Scalars of a parameter group: what windows of the update `step` begin with, and what they leave."""

    step: int = 0
    before: dict[str, Scalar] | None = None
    after: dict[str, Scalar] | None = None

    def begin(self, step: int) -> dict[str, Scalar] | None:
        """What a window of update `step` begins with; None: it is the group's first."""
        if step != self.step:
            self.before, self.step = self.after, step
        return self.before


class TorchRule:
    """An elementwise class of `torch.optim`, whose own code updates one window after the other.

    States of the shape of a parameter are those that torch itself keeps for the groups, as `exp_avg`; they come with
    the windows. Scalars, as step counts, are kept here, since all windows of a group share them. A group begins as in
    torch: its first update makes the states, from whatever was in them.

    Gradients are not modified. Bits do not depend on the division into windows, except with `fused`, where torch's
    kernel on the host rounds the last elements of a tensor in another way than the others.
    """

    wants_whole = False
    is_elementwise: bool | None = True

    def __init__(self, like: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Args: `like` is of an elementwise class and has the defaults of `groups`; it is not used after this."""
        cls = type(like)
        self.name = cls.__name__
        self.kinds = frozenset(base.__name__ for base in cls.__mro__)
        self.defaults: dict[str, Any] = dict(like.defaults)
        self.optimizer = make_empty(cls, {})
        self._known: dict[tuple[tuple[str, bool], ...], tuple[str, ...]] = {}
        self._shared: dict[int, _Shared] = {}
        names = (name for group in groups or [{}] for name in self.slots_of(group))
        self.state_names: tuple[str, ...] = tuple(dict.fromkeys(names))

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`.

        The number of threads is that of torch; `threads` is not used.

        Raises:
            ConfigError: a group has come to need a state that it was set up without.
        """
        del threads
        for window in windows:
            if window.master.numel():
                self._update_one(window, {**self.defaults, **window.group}, grad_scale)

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states of a group with these hyper-parameters, in torch's order."""
        hyper = {**self.defaults, **group}
        kinds = tuple(sorted((k, bool(v)) for k, v in hyper.items() if isinstance(v, bool | int | float)))
        if kinds not in self._known:
            probe = nn.Parameter(torch.zeros(3))
            probe.grad = torch.zeros(3)
            own = {key: value for key, value in _PROBE.items() if key in hyper}
            found = self._step(probe, {**hyper, **own}, None)
            is_slot = {name: isinstance(x, Tensor) and x.shape == probe.shape for name, x in found.items()}
            self._known[kinds] = tuple(name for name, is_one in is_slot.items() if is_one)
        return self._known[kinds]

    def counts(self) -> dict[int, tuple[int, dict[str, Scalar]]]:
        """By group: the update that left them, 0 if they were restored, and its scalars; only groups that began."""
        return {index: (x.step, dict(x.after)) for index, x in self._shared.items() if x.after is not None}

    def restore_counts(self, group: int, scalars: Mapping[str, Scalar]) -> None:
        """Set the scalars of a group, which goes on from them with the states of its next windows."""
        self._shared[group] = _Shared(after=dict(scalars))

    def scalars(self) -> dict[str, Any]:
        """Nothing: all scalars are those of groups."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Begin anew."""
        self._shared.clear()

    def _update_one(self, window: Window, hyper: dict[str, Any], grad_scale: float) -> None:
        names = self.slots_of(window.group)
        missing = [name for name in names if name not in window.state]
        if missing:
            msg = (
                f"a parameter group needs the state {missing[0]} (as with amsgrad, momentum or centered), but the "
                f"optimizer {self.name} was set up without; set it in optimizer.params or in a group before "
                "initialize, so that it is kept and saved"
            )
            raise ConfigError(msg)
        shared = self._shared.setdefault(int(window.key[1]) if len(window.key) > 1 else 0, _Shared())
        before = shared.begin(window.step)
        parameter = nn.Parameter(window.master)
        grad: Tensor = window.grad.to(window.master.dtype)
        parameter.grad = grad * grad_scale if grad_scale != 1.0 else grad
        state = None if before is None else _placed(before, parameter, hyper) | {n: window.state[n] for n in names}
        found = self._step(parameter, hyper, state)
        for name in names:
            if found[name].data_ptr() != window.state[name].data_ptr():
                window.state[name].copy_(found[name])
        shared.after = {name: value for name, value in found.items() if name not in names}
        if window.out is not None:
            window.out.copy_(window.master)

    def _step(self, parameter: nn.Parameter, hyper: Mapping[str, Any], state: dict[str, Any] | None) -> dict[str, Any]:
        """One step of torch for `parameter`; gives its state after it, which without `state` begins."""
        try:
            self.optimizer.param_groups.append({**hyper, "params": [parameter]})
            if state is None:
                begin_state(self.optimizer, parameter, hyper)
            else:
                self.optimizer.state[parameter] = state
            self.optimizer.step()
            return dict(self.optimizer.state[parameter])
        finally:
            self.optimizer.param_groups.clear()
            self.optimizer.state.clear()


def in_windows(rule: Foreign, groups: Sequence[Mapping[str, Any]]) -> TorchRule | Foreign:
    """The rule for states in files: torch's code over windows if the class allows it, else `rule` itself.

    Only the exact classes of torch are known to be elementwise, and an object with hooks on its step may do anything.
    """
    optimizer = rule.optimizer
    hooks = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return TorchRule(optimizer, groups) if is_elementwise(type(optimizer)) and not any(hooks) else rule


def _placed(scalars: Mapping[str, Scalar], parameter: Tensor, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of scalars where torch keeps them: step counts on the host unless kernels on the device read them."""
    is_read_there = bool(hyper.get("capturable") or hyper.get("fused"))
    return {
        name: value.detach().to(parameter.device if name != "step" or is_read_there else HOST, copy=True)
        if isinstance(value, Tensor)
        else value
        for name, value in scalars.items()
    }
