"""LAMB. Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.device_optim import lamb_first_row, lamb_second_row
from mpispeed.native.flat import Terms
from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.native.reference_updates import trust_ratio
from mpispeed.optim.host_rule import HostRule, check_coefficients, check_factors, decay_mode, read_hyper, runs_on_device
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


def lamb_terms(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    is_eps_inside: bool = False,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of LAMB (You et al. 2020); the correction of both moments is one factor, as in DeepSpeed.

    Raises:
        ValueError: betas or step are out of range, or the limits of the trust ratio are not in order.
    """
    beta1, beta2 = check_factors("lamb", betas, step)
    least, most = float(min_coeff), float(max_coeff)
    if not 0.0 <= least <= most:
        msg = f"lamb: min_coeff is {least} and max_coeff {most}; pass 0 <= min_coeff <= max_coeff"
        raise ValueError(msg)
    weight_decay = float(weight_decay)
    correction = math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step) if bias_correction else 1.0
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=float(lr) * correction,
        eps=float(eps),
        decay=weight_decay,
        decay_mode=decay_mode(weight_decay, decoupled=decoupled),
        grad_scale=float(grad_scale),
        is_eps_inside=bool(is_eps_inside),
        least=least,
        most=most,
    )


class Lamb(HostRule):
    """LAMB: Adam's direction with weight decay, with a step in proportion to the norm of each parameter.

    The ratio of the norms is kept within [min_coeff, max_coeff]. Both moments are corrected by one factor, which
    also multiplies the decay, as in DeepSpeed. State: `exp_avg` and `exp_avg_sq`. `update` takes every window as a full
    parameter; the two halves, with sums over ranks in between, take parts.
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

    def first_half(self, windows: Iterable[Window], count: int, *, grad_scale: float, threads: int) -> Tensor:
        """Update the moments; gives the sums of squares of parameters and directions. Shape: (count, 2)."""
        found = [
            (window.entry, self._first(window, grad_scale, threads)) for window in windows if window.master.numel()
        ]
        sums = torch.zeros(count, 2, dtype=torch.float64)
        for device in {row.device for _, row in found}:  # some parts may be offloaded; one wait for each
            own = [(entry, row) for entry, row in found if row.device == device]
            rows = torch.stack([row for _, row in own]).cpu()
            sums.index_add_(0, torch.tensor([entry for entry, _ in own]), rows)
        return sums

    def second_half(self, windows: Iterable[Window], sums: Tensor, *, grad_scale: float, threads: int) -> None:
        """Update masters and `out`. Shape: `sums` is (count, 2), over all parts of each parameter."""
        weights, directions = sums.T.tolist()
        ratios: dict[int, float] = {}
        for window in windows:
            if window.entry is not None and window.master.numel():
                terms = self.terms_of(window, grad_scale)
                ratio = ratios[window.entry] = trust_ratio(weights[window.entry], directions[window.entry], terms)
                _apply(window, self.states_of(window), terms, ratio, threads)
        self._coefficients = list(ratios.values())

    def _first(self, window: Window, grad_scale: float, threads: int) -> Tensor:
        row = Row(window.master, self.states_of(window), window.grad)
        terms = self.terms_of(window, grad_scale)
        if runs_on_device(window.master):
            return lamb_first_row(row, terms)
        return torch.tensor(HostTable("lamb", [row]).run_first([terms], threads=threads)[0], dtype=torch.float64)

    def get_lamb_coeffs(self) -> list[float]:
        """The ratios of the last update, of each parameter of which there was a part here; waits for the device."""
        return [float(ratio) for ratio in self._coefficients]

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step`, from 1, with the hyper-parameters of a group."""
        own = {name: hyper[name] for name in DEFAULTS if name != "eps_inside_sqrt"}
        return lamb_terms(step=step, is_eps_inside=hyper["eps_inside_sqrt"], grad_scale=grad_scale, **own)


def _apply(window: Window, states: tuple[Tensor, ...], terms: Terms, ratio: float, threads: int) -> None:
    row = Row(window.master, states, window.grad, window.out)
    if runs_on_device(window.master):
        lamb_second_row(row, terms, torch.tensor(ratio, dtype=torch.float64).to(window.master.device))
    else:
        HostTable("lamb", [row]).run_second([terms], [ratio], threads=threads)


@RULES.register("Lamb")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    rule = Lamb(**read_hyper("Lamb", params, DEFAULTS, _IGNORED))
    check_coefficients("Lamb", rule.defaults)
    return rule, dict(rule.defaults)
