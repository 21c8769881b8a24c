"""1-bit Adam. Source: Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mpispeed.native.flat import Terms
from mpispeed.optim.exchange import Exchange
from mpispeed.optim.host_rule import HostRule, run_kernel
from mpispeed.optim.onebit_params import DEFAULTS, check_count, onebit_terms, read_onebit, warm_terms
from mpispeed.optim.rule import RULES, Rule, Window


class OnebitAdam(HostRule):
    """Adam whose variance is frozen after `freeze_step` updates; from then on momenta are exchanged as one bit.

    Warm-up: Adam without bias correction on the mean of gradients, p -= lr (m / (sqrt(v) + eps) + weight_decay p).
    After it `exp_avg` holds the momentum that ranks agreed on before an update, and `Window.grad` is not read. Where
    `exp_avg_sq` is 0 there was no gradient in the whole warm-up: such an element keeps a momentum of 0, since one bit
    cannot say 0 and the quotient would be momentum / eps.

    A group with `non_freeze` stays in the warm-up. There is no first update without effect as in DeepSpeed:
    all `freeze_step` updates of the warm-up count.
    """

    kernel = "adam"

    def __init__(self, *, freeze_step: int = 100_000, **hyper: Any) -> None:
        """Raises ConfigError when `freeze_step` is not a whole number of at least 1."""
        super().__init__("OneBitAdam", {**DEFAULTS, **hyper})
        self.freeze_step = check_count(self.name, "freeze_step", freeze_step)

    def exchanges(self, step: int, group: Mapping[str, Any] | None = None) -> Exchange:
        """GRADIENT in the warm-up, then MOMENTUM; see `optim.exchange`."""
        is_warm = step <= self.freeze_step or (group is not None and bool(group.get("non_freeze")))
        return Exchange.GRADIENT if is_warm else Exchange.MOMENTUM

    def mix(self, group: Mapping[str, Any], grad_scale: float, key: tuple[Any, ...] = ()) -> tuple[float, float]:
        """(beta1, (1 - beta1) * grad_scale): factors of the common momentum and of this rank's gradient."""
        beta1 = float({**self.defaults, **group}["betas"][0])
        return beta1, (1.0 - beta1) * grad_scale

    def coefficient(self, key: tuple[Any, ...]) -> float:
        """1: the agreed momentum is taken as it is."""
        return 1.0

    def update_one(self, window: Window, grad_scale: float, threads: int) -> float | Tensor:
        """Update one window that is not empty; gives 1."""
        if self.exchanges(window.step, window.group) is Exchange.GRADIENT:
            return super().update_one(window, grad_scale, threads)
        hyper = {**self.defaults, **window.group}
        terms = onebit_terms(
            lr=float(hyper["lr"]), betas=hyper["betas"], eps=hyper["eps"], weight_decay=hyper["weight_decay"]
        )
        m, v = window.state["exp_avg"], window.state["exp_avg_sq"]
        return run_kernel("onebit_adam", window.master, (m,), v, window.out, terms, threads)

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step` of the warm-up, with the hyper-parameters of a group."""
        return warm_terms(hyper, step, grad_scale)


@RULES.register("OneBitAdam")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    hyper, counts = read_onebit("OneBitAdam", params, DEFAULTS, ("freeze_step",))
    rule = OnebitAdam(**counts, **hyper)
    return rule, dict(rule.defaults)
