"""Adagrad over flat windows. Source: Duchi, Hazan and Singer, JMLR 2011; options as `torch.optim.Adagrad`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mpispeed.native.flat import Terms
from mpispeed.optim.host_rule import HostRule, check_factors, decay_mode, read_hyper
from mpispeed.optim.rule import RULES, Rule, Window

DEFAULTS: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-10,
    "weight_decay": 0.0,
    "lr_decay": 0.0,
    "initial_accumulator_value": 0.0,
    "maximize": False,
}
# Hints about how other implementations work; they do not change the result.
_IGNORED = ("set_grad_none", "fused", "foreach", "differentiable", "fp32_optimizer_states")


def adagrad_terms(
    *,
    step: int,
    lr: float,
    eps: float,
    weight_decay: float,
    lr_decay: float = 0.0,
    decoupled: bool = False,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Adagrad (Duchi et al. 2011); the rate of update t is lr / (1 + (t - 1) lr_decay), as in torch.

    Raises:
        ValueError: step is out of range.
    """
    check_factors("adagrad", None, step)
    rate, weight_decay = float(lr) / (1.0 + (step - 1) * float(lr_decay)), float(weight_decay)
    return Terms(
        step_size=rate,
        eps=float(eps),
        decay=rate * weight_decay if decoupled else weight_decay,
        decay_mode=decay_mode(weight_decay, decoupled=decoupled),
        grad_scale=float(grad_scale),
    )


class Adagrad(HostRule):
    """Adagrad with L2 decay in the gradient.

    State: `sum`, the squared gradients added up; the first update sets it to `initial_accumulator_value` before.
    Bits do not depend on the division into windows, nor on the number of threads.
    """

    kernel = "adagrad"

    def __init__(self, **hyper: Any) -> None:
        super().__init__("Adagrad", {**DEFAULTS, **hyper})

    def takes_codes(self, group: Mapping[str, Any], step: int) -> bool:
        """As other rules; not where the first update begins with a value that no code may have."""
        begins = step == 1 and bool({**self.defaults, **group}["initial_accumulator_value"])
        return not begins and super().takes_codes(group, step)

    def update_one(self, window: Window, grad_scale: float, threads: int) -> float | Tensor:
        """Update one window that is not empty."""
        hyper = {**self.defaults, **window.group}
        if window.step == 1 and hyper["initial_accumulator_value"]:
            window.state["sum"].fill_(float(hyper["initial_accumulator_value"]))
        return super().update_one(window, grad_scale, threads)

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step`, from 1, with the hyper-parameters of a group."""
        return adagrad_terms(
            step=step,
            lr=float(hyper["lr"]),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            lr_decay=float(hyper["lr_decay"]),
            grad_scale=-grad_scale if hyper["maximize"] else grad_scale,
        )


@RULES.register("Adagrad")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    rule = Adagrad(**read_hyper("Adagrad", params, DEFAULTS, _IGNORED))
    return rule, dict(rule.defaults)
