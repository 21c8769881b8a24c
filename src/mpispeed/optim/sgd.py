"""Stochastic gradient descent over flat windows, as `torch.optim.SGD` defines it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError
from mpispeed.optim.rule import RULES, Rule, Window, check_range, drop_auto, refuse_keyword

_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
_IGNORED = frozenset({"foreach", "fused", "differentiable"})
_BLOCK_ELEMENTS = 1 << 18  # temporaries of one pass stay in cache


class SGD:
    """SGD with momentum, dampening, Nesterov's form and L2 decay in the gradient.

    State: `momentum_buffer`, only if the rule is made with momentum; the first step fills it with the
    gradient. Gradients are not modified.
    """

    name = "SGD"
    wants_whole = False
    is_elementwise: bool | None = True

    def __init__(self, **hyper: Any) -> None:
        self.defaults: dict[str, Any] = {**_DEFAULTS, **hyper}
        self.state_names: tuple[str, ...] = ("momentum_buffer",) if self.defaults["momentum"] else ()

    @torch.no_grad()
    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`.

        The number of threads is that of torch; `threads` is not used.

        Raises:
            ConfigError: a group has momentum but the rule was made without.
        """
        del threads
        for window in windows:
            hyper = {**self.defaults, **window.group}
            if hyper["momentum"] and "momentum_buffer" not in window.state:
                msg = (
                    f"a parameter group has momentum {hyper['momentum']!r}, but the optimizer SGD was set up without; "
                    "give momentum in optimizer.params, so that its buffer is kept and saved"
                )
                raise ConfigError(msg)
            for block in _blocks(window):
                _descend(block, hyper, grad_scale)

    def scalars(self) -> dict[str, Any]:
        """Nothing: the step number comes with the windows."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Do nothing."""


def _blocks(window: Window) -> Iterator[Window]:
    total = window.master.numel()
    for start in range(0, total, _BLOCK_ELEMENTS):
        part = slice(start, min(start + _BLOCK_ELEMENTS, total))
        yield Window(
            master=window.master[part],
            grad=window.grad[part],
            state={name: values[part] for name, values in window.state.items()},
            group=window.group,
            step=window.step,
            out=None if window.out is None else window.out[part],
        )


def _descend(block: Window, hyper: dict[str, Any], grad_scale: float) -> None:
    master = block.master
    grad: Tensor = block.grad.to(master.dtype)
    if grad_scale != 1.0:
        grad = grad * grad_scale
    if hyper["maximize"]:
        grad = -grad
    if hyper["weight_decay"]:
        grad = grad.add(master, alpha=float(hyper["weight_decay"]))
    momentum = float(hyper["momentum"])
    if momentum:
        buffer = block.state["momentum_buffer"]
        if block.step == 1:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad, alpha=1 - float(hyper["dampening"]))
        grad = grad.add(buffer, alpha=momentum) if hyper["nesterov"] else buffer
    master.add_(grad, alpha=-float(hyper["lr"]))
    if block.out is not None:
        block.out.copy_(master)


@RULES.register("SGD")
def _build_sgd(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    for key in params:
        if key not in _DEFAULTS and key not in _IGNORED:
            refuse_keyword(key, {*_DEFAULTS, *_IGNORED}, "the optimizer SGD")
    hyper = {key: value for key, value in params.items() if key in _DEFAULTS}
    for key in ("lr", "momentum", "weight_decay"):
        if key in hyper:
            hyper[key] = check_range("SGD", key, hyper[key])
    if "dampening" in hyper:
        hyper["dampening"] = check_range("SGD", "dampening", hyper["dampening"], least=float("-inf"))
    rule = SGD(**hyper)
    if rule.defaults["nesterov"] and (not rule.defaults["momentum"] or rule.defaults["dampening"]):
        msg = (
            f"nesterov of the optimizer SGD needs momentum above 0 and dampening 0; found momentum "
            f"{rule.defaults['momentum']!r} and dampening {rule.defaults['dampening']!r}"
        )
        raise ConfigError(msg)
    return rule, dict(rule.defaults)
