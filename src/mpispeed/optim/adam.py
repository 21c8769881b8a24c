"""Adam and AdamW over flat windows, by the compiled kernel where it fits and by its torch reference elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mpispeed.base.errors import UnsupportedOption
from mpispeed.native.flat import Terms
from mpispeed.optim.foreign import make_empty
from mpispeed.optim.host_rule import HostRule, check_factors, decay_mode, read_hyper
from mpispeed.optim.rule import RULES, Rule, drop_auto
from mpispeed.optim.torch_rule import TorchRule

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
# Hints about how other implementations work; they do not change the result.
_IGNORED = ("set_grad_none", "fused", "foreach", "fp32_optimizer_states")


def adam_terms(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019).

    Raises:
        ValueError: betas or step are out of range.
    """
    beta1, beta2 = check_factors("adam", betas, step)
    lr, weight_decay = float(lr), float(weight_decay)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr / correction1,
        root_scale=1.0 / math.sqrt(correction2),
        eps=float(eps),
        decay=lr * weight_decay if decoupled else weight_decay,
        decay_mode=decay_mode(weight_decay, decoupled=decoupled),
        grad_scale=float(grad_scale),
    )


class Adam(HostRule):
    """Adam with decoupled weight decay (`adam_w_mode`, that is AdamW) or with L2 decay in the gradient.

    State: `exp_avg` and `exp_avg_sq`. Bits do not depend on the division into windows, nor on the number of threads.
    """

    kernel = "adam"

    def __init__(self, *, adam_w_mode: bool = True, name: str = "Adam", **hyper: Any) -> None:
        super().__init__(name, {**DEFAULTS, **hyper})
        self.adam_w_mode = adam_w_mode

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step`, from 1, with the hyper-parameters of a group."""
        own = {name: hyper[name] for name in DEFAULTS}
        return adam_terms(step=step, decoupled=self.adam_w_mode, grad_scale=grad_scale, **own)


def _build(name: str, is_decoupled: bool, params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    is_decoupled = bool(params.pop("adam_w_mode", True)) or is_decoupled
    if params.pop("torch_adam", False):
        theirs = TorchRule(make_empty(torch.optim.AdamW if is_decoupled else torch.optim.Adam, params))
        return theirs, dict(theirs.defaults)
    if params.pop("amsgrad", False):
        msg = (
            f"amsgrad is true in the params of the optimizer {name}; this variant is not supported. "
            'Remove it, or set "torch_adam": true to use the optimizer of torch'
        )
        raise UnsupportedOption(msg)
    hyper = read_hyper(name, params, DEFAULTS, (*_IGNORED, "adam_w_mode", "torch_adam"))
    rule = Adam(adam_w_mode=is_decoupled, name=name, **hyper)
    return rule, dict(rule.defaults)


@RULES.register("Adam")
def _build_adam(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    # As in DeepSpeed, "Adam" decouples the weight decay unless adam_w_mode is false.
    return _build("Adam", False, params)


@RULES.register("AdamW")
def _build_adamw(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    return _build("AdamW", True, params)
