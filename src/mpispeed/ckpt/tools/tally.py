"""Moments of many numbers, accumulated piece by piece in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Number = int | float

#: squares of numbers between 1 / _SAFE and _SAFE neither overflow nor vanish in float64
_SAFE = 1e140
#: the exponent of zeros: any other is larger
_NO_EXPONENT = -10_000


@dataclass(slots=True)
class Tally:
    """Counts, range and moments of the numbers seen so far; only finite ones enter range and moments.

    Each piece is summed as deviations from a mean of that piece, and pieces are merged by the formula of Chan, Golub
    and LeVeque. With numpy's pairwise sums of 2**17 elements the error of the mean, in units of the mean absolute
    value, stays below about (50 + pieces) * 2**-53, and the relative error of std below that times
    (1 + abs(mean) / std), where sums of squares would have the square of this ratio. Pieces of numbers whose squares
    would overflow or vanish are scaled by a power of two, which is exact.

    Attributes:
        count: numbers seen.
        finite: those that are neither NaN nor infinite.
        low, high: least and greatest finite number; None when there was none.
        mean_part, square_part: mean and sum of squared deviations, of numbers times 2**-exponent.
    """

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    low: Number | None = None
    high: Number | None = None
    mean_part: float = 0.0
    square_part: float = 0.0
    exponent: int = _NO_EXPONENT

    def add(self, values: np.ndarray) -> None:
        """Take real numbers in."""
        kept = finite_of(values)
        piece = Tally(len(values), len(kept), len(values) - int(np.count_nonzero(values)))
        if len(kept) < len(values):
            piece.nan = int(np.count_nonzero(np.isnan(values)))
            piece.inf = len(values) - len(kept) - piece.nan
        if len(kept):
            piece._take_moments(kept)
        self.merge(piece)

    def merge(self, other: Tally) -> None:
        """Merge another tally."""
        self.count += other.count
        self.zeros += other.zeros
        self.nan += other.nan
        self.inf += other.inf
        if other.low is None or other.high is None:
            return
        exponent = max(self.exponent, other.exponent)
        mean, square = self._scaled(exponent)
        other_mean, other_square = other._scaled(exponent)
        total = self.finite + other.finite
        step = other_mean - mean
        self.square_part = square + other_square + step * step * (self.finite / total) * other.finite
        self.mean_part = mean + step * (other.finite / total)
        self.exponent, self.finite = exponent, total
        self.low = other.low if self.low is None else min(self.low, other.low)
        self.high = other.high if self.high is None else max(self.high, other.high)

    @property
    def mean(self) -> float | None:
        """Mean of the finite numbers; None when there are none."""
        return self._unscaled(self.mean_part)

    @property
    def std(self) -> float | None:
        """Standard deviation over all finite numbers (divided by their count)."""
        return self._unscaled(math.sqrt(self.square_part / self.finite)) if self.finite else None

    @property
    def rms(self) -> float | None:
        """Root of the mean square: both parts are positive, so nothing cancels."""
        if not self.finite:
            return None
        return self._unscaled(math.sqrt(self.mean_part**2 + self.square_part / self.finite))

    def _take_moments(self, kept: np.ndarray) -> None:
        low, high = kept.min().item(), kept.max().item()
        self.low, self.high = (int(low), int(high)) if kept.dtype.kind in "biu" else (low, high)
        largest = max(abs(float(low)), abs(float(high)))
        if largest == 0:
            return
        wide = kept.astype(np.float64)
        self.exponent = 0 if 1 / _SAFE < largest < _SAFE else math.frexp(largest)[1]
        if self.exponent:
            wide = np.ldexp(wide, -self.exponent)
        ends = (math.ldexp(float(low), -self.exponent), math.ldexp(float(high), -self.exponent))
        middle = min(max(float(wide.sum()) / len(wide), ends[0]), ends[1])
        wide -= middle
        rest = float(wide.sum())
        self.mean_part = middle + rest / len(wide)
        self.square_part = max(0.0, float(np.square(wide, out=wide).sum()) - rest * rest / len(wide))

    def _scaled(self, exponent: int) -> tuple[float, float]:
        shift = self.exponent - exponent
        return math.ldexp(self.mean_part, shift), math.ldexp(self.square_part, 2 * shift)

    def _unscaled(self, value: float) -> float | None:
        if not self.finite:
            return None
        with np.errstate(over="ignore"):
            return float(np.ldexp(value, self.exponent if value else 0))


def finite_of(values: np.ndarray) -> np.ndarray:
    """The finite ones of real numbers; `values` itself where all are."""
    if values.dtype.kind != "f":
        return values
    is_finite = np.isfinite(values)
    return values if is_finite.all() else values[is_finite]
