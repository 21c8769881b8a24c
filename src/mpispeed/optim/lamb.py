"""LAMB over whole parameters. Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mpispeed.native.host_terms import Terms, lamb_terms
from mpispeed.optim.host_rule import HostRule, check_coefficients, read_hyper
from mpispeed.optim.rule import RULES, Rule, Window

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}
# Hints about how other implementations work; they do not change the result.
_IGNORED = ("set_grad_none", "fp32_optimizer_states")


class Lamb(HostRule):
    """LAMB: Adam's direction with weight decay, with a step in proportion to the norm of each parameter.

    The ratio of the norms is kept within [min_coeff, max_coeff]. Both moments are corrected by one factor, which
    also multiplies the decay, as in DeepSpeed. State: `exp_avg` and `exp_avg_sq`. It needs whole parameters: every
    window is taken as one.
    """

    kernel = "lamb"
    wants_whole = True
    is_elementwise: bool | None = False

    def __init__(self, **hyper: Any) -> None:
        super().__init__("Lamb", {**DEFAULTS, **hyper})
        self._coefficients: list[float | Tensor] = []

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window from its gradient times `grad_scale`."""
        self._coefficients = [
            self.update_one(window, grad_scale, threads) for window in windows if window.master.numel()
        ]

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of the last update, one for each window that was not empty; waits for the device."""
        return [float(ratio) for ratio in self._coefficients]

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step`, from 1, with the hyper-parameters of a group."""
        return lamb_terms(
            step=step,
            lr=float(hyper["lr"]),
            betas=(float(hyper["betas"][0]), float(hyper["betas"][1])),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            bias_correction=bool(hyper["bias_correction"]),
            is_eps_inside=bool(hyper["eps_inside_sqrt"]),
            min_coeff=float(hyper["min_coeff"]),
            max_coeff=float(hyper["max_coeff"]),
            grad_scale=grad_scale,
        )


@RULES.register("Lamb")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    rule = Lamb(**read_hyper("Lamb", params, DEFAULTS, _IGNORED))
    check_coefficients("Lamb", rule.defaults)
    return rule, dict(rule.defaults)
