"""LAMB. Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mpispeed.native.coefficients import Terms, lamb_terms
from mpispeed.native.device_optim import lamb_first_row, lamb_second_row
from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.native.reference_updates import trust_ratio
from mpispeed.optim.host_rule import HostRule, check_coefficients, read_hyper, runs_on_device
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
