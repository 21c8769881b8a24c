"""1-bit LAMB. Source: Li et al., "1-bit LAMB", HiPC 2022, arXiv 2104.06069."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native.flat import Terms
from mpispeed.native.onebit_lamb import FrozenLamb, update_frozen_lamb
from mpispeed.optim.exchange import Exchange
from mpispeed.optim.host_rule import HostRule, check_coefficients, run_kernel
from mpispeed.optim.lamb import lamb_terms
from mpispeed.optim.onebit_params import DEFAULTS as SHARED
from mpispeed.optim.onebit_params import check_count, read_onebit
from mpispeed.optim.rule import RULES, Rule, Window, key_text

DEFAULTS: dict[str, Any] = {
    **SHARED,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}
# A momentum smaller than this share of the mean one is taken as 0: it is below the rounding of the others, and
# its reciprocal would let the next gradient of that parameter drown all others in the common scale.
_NOTHING = 2.0**-24


@dataclass(slots=True)
class _Numbers:
    """Numbers of one parameter outside of the slots."""

    lamb_coeff_freeze: float = 0.0  # moving mean of the trust ratio in the warm-up
    last_factor: float = 1.0
    scaling_coeff: float | None = None  # None in the warm-up


class OnebitLamb(HostRule):
    """LAMB whose variance is frozen after `freeze_step` updates; from then on momenta are exchanged as one bit.

    Warm-up: LAMB without bias correction on the mean of gradients; a moving mean of every parameter's trust ratio is
    kept. After it the step of a parameter is that mean times a factor, which follows how far a fresh variance, made
    of the gradients that the momenta imply, has drifted from the frozen one.

    For an update after the warm-up the caller:

    1. at the first of them gives `prepare` the norms of all momenta, if `lacks_scaling` says so;
    2. mixes with `mix`, averages, and divides by `coefficient`, see `optim.exchange.MixesMomentum`;
    3. calls `update` with the agreed momentum in `exp_avg` and that of the update before in `Window.grad`.

    Where `exp_avg_sq` is 0 there was no gradient in the whole warm-up: such an element keeps a momentum of 0. Every
    window is one full parameter. A parameter whose warm-up begins again forgets its numbers.
    """

    kernel = "lamb"
    wants_whole = True
    number_names = ("lamb_coeff_freeze", "last_factor", "scaling_coeff")
    is_elementwise: bool | None = False

    def __init__(self, *, freeze_step: int = 100_000, **hyper: Any) -> None:
        """Raises ConfigError when `freeze_step` is not a whole number of at least 1."""
        super().__init__("OneBitLamb", {**DEFAULTS, **hyper})
        self.state_names = (*self.state_names, "exp_avg_sq_fresh")
        self.freeze_step = check_count(self.name, "freeze_step", freeze_step)
        self._numbers: dict[str, _Numbers] = {}
        self._coefficients: list[float] = []

    def exchanges(self, step: int, group: Mapping[str, Any] | None = None) -> Exchange:
        """GRADIENT in the warm-up, then MOMENTUM; see `optim.exchange`."""
        return Exchange.GRADIENT if step <= self.freeze_step else Exchange.MOMENTUM

    def lacks_scaling(self, step: int, keys: Iterable[tuple[Any, ...]]) -> bool:
        """True if `prepare` must be called before update `step` of these windows."""
        return step > self.freeze_step and any(self._of(key).scaling_coeff is None for key in keys)

    def prepare(self, norms: Mapping[tuple[Any, ...], tuple[float, int]], *, mean: float | None = None) -> None:
        """Fix the coefficients that bring all momenta to one size.

        Args: `norms` has for every window of this rank's part of the model, by key, the 2-norm of the full momentum
        and its number of elements; it must be equal on all ranks that average together. `mean` is that of
        norm / sqrt(elements) over the whole model; by default over this part of it.
        """
        sizes = {key: norm / math.sqrt(count) for key, (norm, count) in norms.items() if count}
        if mean is None:
            mean = sum(sizes.values()) / len(sizes) if sizes else 0.0
        for key in norms:
            size = sizes.get(key, 0.0)
            self._of(key).scaling_coeff = mean / size if size > _NOTHING * mean else 1.0

    def mix(self, group: Mapping[str, Any], grad_scale: float, key: tuple[Any, ...] = ()) -> tuple[float, float]:
        """The factors of the common momentum and of this rank's gradient, both with the coefficient of the window."""
        beta1, scaling = float({**self.defaults, **group}["betas"][0]), self.coefficient(key)
        return beta1 * scaling, (1.0 - beta1) * grad_scale * scaling

    def coefficient(self, key: tuple[Any, ...]) -> float:
        """Divisor of the agreed momentum of a window.

        Raises:
            UsageError: `prepare` was not called for the window.
        """
        scaling = self._of(key).scaling_coeff
        if scaling is None:
            msg = f"OneBitLamb: window {key} has no scaling coefficient; call prepare with the norms of all momenta"
            raise UsageError(msg)
        return scaling

    def update(self, windows: Iterable[Window], *, grad_scale: float = 1.0, threads: int = 1) -> None:
        """Update the master, state and `out` of every window; `grad_scale` is for gradients, in the warm-up only."""
        self._coefficients = [
            self.update_one(window, grad_scale, threads) for window in windows if window.master.numel()
        ]

    def update_one(self, window: Window, grad_scale: float, threads: int) -> float:
        """Update one window that is not empty; gives the coefficient of its step."""
        hyper, numbers = {**self.defaults, **window.group}, self._of(window.key)
        m, v, fresh = (window.state[name] for name in self.state_names)
        if window.step > self.freeze_step:
            if numbers.last_factor == 1.0 and not bool(fresh.any()):
                fresh.copy_(v)  # a warm-up that a checkpoint with another freeze_step has ended
            factors = FrozenLamb(
                lr=float(hyper["lr"]),
                betas=(float(hyper["betas"][0]), float(hyper["betas"][1])),
                eps=float(hyper["eps"]),
                weight_decay=float(hyper["weight_decay"]),
                trust=numbers.lamb_coeff_freeze,
                last_factor=numbers.last_factor,
                factor_min=float(hyper["factor_min"]),
                factor_max=float(hyper["factor_max"]),
                factor_threshold=float(hyper["factor_threshold"]),
            )
            numbers.last_factor = update_frozen_lamb(window.master, (m, v, fresh), window.grad, window.out, factors)
            return numbers.lamb_coeff_freeze * numbers.last_factor
        if numbers.scaling_coeff is not None:
            numbers = self._numbers[key_text(window.key)] = _Numbers()
        terms = self.terms(hyper, window.step, grad_scale)
        # A number, since a checkpoint has the moving mean as one: on a device this waits for the update.
        ratio = float(run_kernel(self.kernel, window.master, (m, v), window.grad, window.out, terms, threads))
        if ratio != 1.0:
            share = float(hyper["coeff_beta"])
            numbers.lamb_coeff_freeze = share * numbers.lamb_coeff_freeze + (1.0 - share) * ratio
        if window.step == self.freeze_step:
            fresh.copy_(v)
        return ratio

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the last update, one for each window that was not empty."""
        return list(self._coefficients)

    def terms(self, hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
        """The factors of update number `step` of the warm-up, with the hyper-parameters of a group."""
        return lamb_terms(
            step=step,
            lr=float(hyper["lr"]),
            betas=(float(hyper["betas"][0]), float(hyper["betas"][1])),
            eps=float(hyper["eps"]),
            weight_decay=float(hyper["weight_decay"]),
            bias_correction=False,
            min_coeff=float(hyper["min_coeff"]),
            max_coeff=float(hyper["max_coeff"]),
            grad_scale=grad_scale,
        )

    def scalars(self) -> dict[str, Any]:
        """By window key: lamb_coeff_freeze, last_factor and, after the warm-up, scaling_coeff."""
        rows = {name: asdict(numbers) for name, numbers in self._numbers.items()}
        return {name: {key: x for key, x in row.items() if x is not None} for name, row in rows.items()}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the result of `scalars`, for windows with the same keys."""
        rows = {name: {key: float(x) for key, x in row.items()} for name, row in scalars.items()}
        for name, row in rows.items():
            if not all(map(math.isfinite, row.values())) or row.get("scaling_coeff", 1.0) <= 0.0:
                msg = f"OneBitLamb: the numbers of window {name} are {row}; they are finite, and scaling_coeff above 0"
                raise UsageError(msg)
        self._numbers = {name: _Numbers(**row) for name, row in rows.items()}

    def _of(self, key: tuple[Any, ...]) -> _Numbers:
        return self._numbers.setdefault(key_text(key), _Numbers())


@RULES.register("OneBitLamb")
def _build(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    hyper, counts = read_onebit("OneBitLamb", params, DEFAULTS, ("freeze_step",))
    rule = OnebitLamb(**counts, **hyper)
    check_coefficients("OneBitLamb", rule.defaults)
    _check_factors(rule.defaults)
    return rule, dict(rule.defaults)


def _check_factors(hyper: Mapping[str, Any]) -> None:
    for key in ("coeff_beta", "factor_threshold"):
        if hyper[key] >= 1.0:
            msg = f"{key} of the optimizer OneBitLamb is {hyper[key]!r}; expected a number at least 0 and below 1"
            raise ConfigError(msg)
    if hyper["factor_min"] > hyper["factor_max"]:
        msg = (
            f"factor_min of the optimizer OneBitLamb is {hyper['factor_min']!r} and factor_max "
            f"{hyper['factor_max']!r}; factor_min may not be above factor_max"
        )
        raise ConfigError(msg)
