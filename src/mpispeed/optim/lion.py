"""Lion over flat windows. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpispeed.native.flat import Terms
from mpispeed.optim.host_rule import HostRule, check_factors, decay_mode, read_hyper
from mpispeed.optim.rule import RULES, Rule

DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
# Hints about how other implementations work; they do not change the result.
_IGNORED = ("set_grad_none", "fp32_optimizer_states")


def lion_terms(
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Lion (Chen et al. 2023), which do not depend on the step.

    Raises:
        ValueError: betas are out of range.
    """
    beta1, beta2 = check_factors("lion", betas, 1)
    lr, weight_decay = float(lr), float(weight_decay)
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr,
        decay=lr * weight_decay if decoupled else weight_decay,
        decay_mode=decay_mode(weight_decay, decoupled=decoupled),
        grad_scale=float(grad_scale),
    )


class Lion(HostRule):
    """Lion: a step of lr in the direction of a sign, with decoupled weight decay.

    State: `exp_avg`. Bits do not depend on the division into windows, nor on the number of threads.
    """

    kernel = "lion"

    def __init__(self, **hyper: Any) -> None:
        super().__init__("Lion", {**DEFAULTS, **hyper})

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of an update with the hyper-parameters of a group; `step` does not matter."""
        del step
        return lion_terms(grad_scale=grad_scale, **{name: hyper[name] for name in DEFAULTS})


@RULES.register("Lion")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    rule = Lion(**read_hyper("Lion", params, DEFAULTS, _IGNORED))
    return rule, dict(rule.defaults)
