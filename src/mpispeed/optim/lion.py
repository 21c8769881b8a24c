"""Lion over flat windows. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpispeed.native.coefficients import Terms, lion_terms
from mpispeed.optim.host_rule import HostRule, read_hyper
from mpispeed.optim.rule import RULES, Rule

DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
# Hints about how other implementations work; they do not change the result.
_IGNORED = ("set_grad_none", "fp32_optimizer_states")


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
        return lion_terms(
            lr=float(hyper["lr"]),
            betas=(float(hyper["betas"][0]), float(hyper["betas"][1])),
            weight_decay=float(hyper["weight_decay"]),
            grad_scale=grad_scale,
        )


@RULES.register("Lion")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    rule = Lion(**read_hyper("Lion", params, DEFAULTS, _IGNORED))
    return rule, dict(rule.defaults)
