"""Step times predicted from a few measured ones: physical terms with positive rates, and small corrections.

The seconds of a step are a sum of terms, each an amount of the forecast (samples, calls, bytes by verb, bytes of files,
bytes updated) times a rate that cannot be negative. Every value of every setting has a correction besides, such as +4 %
for stage 3. Rates and corrections are found together, by least squares of relative errors with a Gaussian prior on
each, which also says how sure a prediction is (Bayesian linear regression, for instance Bishop, "Pattern Recognition
and Machine Learning", 3.3; bounds by the active sets of Lawson and Hanson, "Solving Least Squares Problems", 23).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpispeed.tuning.forecast import Forecast

Point = Mapping[str, Any]
"""Setting -> value, of those that candidates differ in."""

NOISES = (0.02, 0.04, 0.08, 0.16, 0.32)
"""Standard deviations of a measured step time from the model's, relative; the likeliest counts, as machines differ."""

USUAL_NOISE = 0.04

CORRECTION = 0.12
"""Standard deviation of the correction for one value of a setting, relative."""

MOST_CORRECTION = 0.6
"""Greatest sum of corrections that a prediction takes."""

SUMS = ("all_reduce", "reduce_scatter", "all_gather")
"""Verbs with rates of their own; others share one."""

_RATES = {
    "constant": 2e-3,
    "micro-steps": 5e-3,
    "calls": 1e-4,
    **{f"bytes of {verb}": 1e-9 for verb in (*SUMS, "other verbs")},
    **{f"early bytes of {verb}": 5e-10 for verb in (*SUMS, "other verbs")},
    "bytes from files": 1e-9,
    "bytes to files": 1e-9,
    "bytes to and from the device": 2e-10,
    "bytes updated": 3e-10,
}
"""Rates before anything is measured, in seconds for each unit: those of common hardware, within a factor of some."""

_SPREAD = 3.0
"""Standard deviation of a rate before anything is measured, relative to it."""

TERMS = ("samples", *_RATES)


def terms_of(forecast: Forecast) -> dict[str, float]:
    """Amounts of one step that take time."""
    found = dict.fromkeys(TERMS, 0.0)
    found["constant"] = 1.0
    found["micro-steps"] = float(forecast.micro_steps)
    found["samples"] = float(forecast.micro_steps * forecast.micro_batch)
    found["calls"] = float(sum(forecast.calls.values()))
    early = "early " if forecast.is_overlapped else ""
    for verb, size in forecast.sent.items():
        found[f"{early}bytes of {verb if verb in SUMS else 'other verbs'}"] += size
    for way, size in forecast.moved.items():
        source, _, target = way.partition(" > ")
        kind = "from files" if source == "nvme" else "to files" if target == "nvme" else "to and from the device"
        found[f"bytes {kind}"] += size
    found["bytes updated"] = float(forecast.updated)
    return found


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step, and the relative standard deviation of that."""

    seconds: float
    spread: float


class TimeModel:
    """Predicts step times of candidates; `fit` again after each trial.

    Args:
        forecasts: of all candidates.
        points: the settings in which they differ, likewise.
    """

    def __init__(self, forecasts: Sequence[Forecast], points: Sequence[Point]) -> None:
        self._amounts = np.array([[terms_of(one)[name] for name in TERMS] for one in forecasts], dtype=np.float64)
        columns: dict[tuple[str, str], int] = {}
        rows = [[columns.setdefault((key, repr(value)), len(columns)) for key, value in p.items()] for p in points]
        self._marks = np.zeros((len(points), len(columns)))
        for row, places in enumerate(rows):
            self._marks[row, places] = 1.0
        self._rates = np.array([0.0, *_RATES.values()])
        self._corrections = np.zeros(len(columns))
        self._covariance = np.eye(len(TERMS) + len(columns))
        self._scales = np.ones(len(TERMS))

    @property
    def rates(self) -> dict[str, float]:
        """Seconds for each unit of every term, as fitted."""
        return dict(zip(TERMS, map(float, self._rates), strict=True))

    def fit(self, places: Sequence[int], seconds: Sequence[float]) -> None:
        """Fit to measured steps: the places of their candidates, and their seconds."""
        if not places:
            return
        chosen, measured = list(places), np.asarray(seconds, dtype=np.float64)
        # Nothing is known of the time of a sample, but that it is at most all there is.
        samples = float(np.max(measured / np.maximum(self._amounts[chosen, 0], 1.0)))
        means = np.array([samples / 2, *_RATES.values()])
        scales = np.array([samples, *(_SPREAD * rate for rate in _RATES.values())])
        design = np.hstack([self._amounts[chosen] * scales / measured[:, None], self._marks[chosen]])
        weights = np.concatenate([np.ones(len(TERMS)), np.full(self._marks.shape[1], CORRECTION**-2)])
        prior = np.concatenate([means / scales, np.zeros(self._marks.shape[1])])
        noise = max(NOISES, key=lambda one: _evidence(design, weights, prior, one))
        hessian = design.T @ design / noise**2 + np.diag(weights)
        right = design.sum(axis=0) / noise**2 + weights * prior
        is_bounded = np.arange(len(prior)) < len(TERMS)
        found = solve_bounded(hessian, right, is_bounded)
        self._rates, self._scales = found[: len(TERMS)] * scales, scales
        self._corrections, self._covariance = found[len(TERMS) :], np.linalg.inv(hessian)

    def predict(self, place: int) -> Prediction:
        """The prediction for one candidate, by its place."""
        amounts, marks = self._amounts[place], self._marks[place]
        share = 1.0 - min(max(float(marks @ self._corrections), -MOST_CORRECTION), MOST_CORRECTION)
        seconds = max(float(amounts @ self._rates), 1e-9) / share
        row = np.concatenate([amounts * self._scales / seconds, marks])
        return Prediction(seconds, math.sqrt(max(float(row @ self._covariance @ row), 0.0)))


def _evidence(design: np.ndarray, weights: np.ndarray, prior: np.ndarray, noise: float) -> float:
    """Logarithm of the probability of the measurements, relative ones of 1, and of so much noise."""
    covariance = noise**2 * np.eye(len(design)) + (design / weights) @ design.T
    rest = 1.0 - design @ prior
    _, size = np.linalg.slogdet(covariance)
    return -0.5 * float(rest @ np.linalg.solve(covariance, rest) + size) - 0.5 * math.log(noise / USUAL_NOISE) ** 2


def solve_bounded(hessian: np.ndarray, right: np.ndarray, is_bounded: np.ndarray) -> np.ndarray:
    """The least x' H x / 2 - r' x with x >= 0 where it is bounded.

    Args:
        hessian: H, symmetric and positive definite, (n, n).
        right: r, (n,).
        is_bounded: which of x are, (n,).
    """
    count, tiny = len(right), 1e-10 * float(np.abs(right).max() or 1.0)
    x, is_free = np.zeros(count), ~is_bounded
    for _ in range(10 * count + 10):
        while True:
            free = np.flatnonzero(is_free)
            goal = np.zeros(count)
            goal[free] = np.linalg.solve(hessian[np.ix_(free, free)], right[free])
            bad = free[is_bounded[free] & (goal[free] <= 0)]
            if not len(bad):
                x = goal
                break
            # As far towards the goal as bounds allow; what meets its bound stays there.
            steps = x[bad] / np.maximum(x[bad] - goal[bad], 1e-300)
            x = x + float(steps.min()) * (goal - x)
            stuck = bad[steps <= steps.min()]
            x[stuck], is_free[stuck] = 0.0, False
        slope = np.where(is_free, -np.inf, right - hessian @ x)
        best = int(slope.argmax())
        if slope[best] <= tiny:
            break
        is_free[best] = True
    return x
