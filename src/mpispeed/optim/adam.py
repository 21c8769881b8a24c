"""Adam and AdamW over flat windows, by the compiled kernel where it fits and by its torch twin elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpispeed.base.errors import ConfigError, UnsupportedOption
from mpispeed.native.host_optim import adam, adam_reference
from mpispeed.optim.foreign import Foreign
from mpispeed.optim.rule import RULES, Rule, Window, check_range, drop_auto, refuse_keyword

_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
# Hints about how other implementations work; they do not change the result.
_IGNORED = frozenset({"set_grad_none", "fused", "foreach", "fp32_optimizer_states"})


class Adam:
    """Adam with decoupled weight decay (`adam_w_mode`, that is AdamW) or with L2 decay in the gradient.

    State: `exp_avg` and `exp_avg_sq`. Gradients are not modified. Bits do not depend on the cut into
    windows, nor on the number of threads.
    """

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    wants_whole = False
    is_elementwise: bool | None = True

    def __init__(self, *, adam_w_mode: bool = True, name: str = "Adam", **hyper: Any) -> None:
        self.name = name
        self.adam_w_mode = adam_w_mode
        self.defaults: dict[str, Any] = {**_DEFAULTS, **hyper}

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`."""
        for window in windows:
            if window.master.numel():
                self._update(window, grad_scale, threads)

    def _update(self, window: Window, grad_scale: float, threads: int) -> None:
        hyper = {**self.defaults, **window.group}
        # The kernel is for fp32 in host memory; its twin takes every dtype and device.
        has_kernel = window.master.dtype == torch.float32 and window.master.device.type == "cpu"
        update = adam if has_kernel else adam_reference
        update(
            window.master,
            window.state["exp_avg"],
            window.state["exp_avg_sq"],
            window.grad,
            out=window.out,
            step=window.step,
            lr=float(hyper["lr"]),
            betas=(float(hyper["betas"][0]), float(hyper["betas"][1])),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            decoupled=self.adam_w_mode,
            bias_correction=bool(hyper["bias_correction"]),
            grad_scale=grad_scale,
            threads=threads,
        )

    def scalars(self) -> dict[str, Any]:
        """Nothing: the step number comes with the windows."""
        return {}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Nothing to take back."""


def _build(name: str, is_decoupled: bool, params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    is_decoupled = bool(params.pop("adam_w_mode", True)) or is_decoupled
    if params.pop("torch_adam", False):
        foreign = Foreign(torch.optim.AdamW if is_decoupled else torch.optim.Adam, params)
        return foreign, dict(foreign.defaults)
    if params.pop("amsgrad", False):
        msg = (
            f"amsgrad is true in the params of the optimizer {name}; this variant is not supported. "
            'Remove it, or set "torch_adam": true to use the optimizer of torch'
        )
        raise UnsupportedOption(msg)
    for key in params:
        if key not in _DEFAULTS and key not in _IGNORED:
            known = {*_DEFAULTS, *_IGNORED, "amsgrad", "adam_w_mode", "torch_adam"}
            refuse_keyword(key, known, f"the optimizer {name}")
    hyper = {key: value for key, value in params.items() if key in _DEFAULTS}
    for key in ("lr", "eps", "weight_decay"):
        if key in hyper:
            hyper[key] = check_range(name, key, hyper[key])
    if "betas" in hyper:
        hyper["betas"] = _checked_betas(name, hyper["betas"])
    rule = Adam(adam_w_mode=is_decoupled, name=name, **hyper)
    return rule, dict(rule.defaults)


def _checked_betas(name: str, betas: Any) -> tuple[float, float]:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        msg = f"betas of the optimizer {name} is {betas!r}; expected two numbers such as [0.9, 0.999]"
        raise ConfigError(msg)
    first, second = (check_range(name, "betas", beta, below=1.0) for beta in betas)
    return first, second


@RULES.register("Adam")
def _build_adam(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    # As in DeepSpeed, "Adam" decouples the weight decay unless adam_w_mode is false.
    return _build("Adam", False, params)


@RULES.register("AdamW")
def _build_adamw(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    return _build("AdamW", True, params)
