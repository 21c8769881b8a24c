"""The order in which candidates are tried, and when a search ends."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mpispeed.tuning.time_model import Prediction, TimeModel

if TYPE_CHECKING:
    from mpispeed.tuning.forecast import Forecast
    from mpispeed.tuning.time_model import Point

SEED = 1234

LEAST_GAIN = 0.01
"""Gain that an untried candidate has to promise."""

FIRST_TRIALS = 4
"""Trials before a model may end a search."""

LOOKS = (1, 2)
"""Numbers of measured trials after which the next one is what is known least about."""

LONGEST_LOOK = 5.0
"""Most of the time of the trials before that such a step may take, as predicted."""

EAGERNESS = 1.0
"""Standard deviations by which the unknown counts as better."""


SUSPICION = 0.5
"""Weight of each value that a candidate shares with failed trials alone, as a logarithm of its cost."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured candidate: its place, and the cost to be minimised; infinity for one that failed."""

    place: int
    cost: float


class Order(Protocol):
    """Interface of the ways to search."""

    def next(self, left: Sequence[int], trials: Sequence[Trial]) -> int | None:
        """The place to try next out of those left; None: no other promises more. `left` is not empty."""


class Listed:
    """In the order of the list, as the tuner "gridsearch"."""

    def next(self, left: Sequence[int], trials: Sequence[Trial]) -> int | None:
        """The first."""
        del trials
        return left[0]


class Shuffled:
    """By chance, each once, as the tuner "random"; the same order in every search."""

    def __init__(self, seed: int = SEED) -> None:
        self._random = random.Random(seed)

    def next(self, left: Sequence[int], trials: Sequence[Trial]) -> int | None:
        """Any."""
        del trials
        return self._random.choice(left)


class Predicted:
    """By the model of step times: what it predicts to be best, and now and then what it knows least about.

    Args:
        forecasts: of all candidates.
        points: the settings in which they differ.
        per_sample: costs are seconds for each sample, else those of a step.
    """

    def __init__(self, forecasts: Sequence[Forecast], points: Sequence[Point], *, per_sample: bool) -> None:
        self._points = [{(key, repr(value)) for key, value in point.items()} for point in points]
        self._units = [one.train_batch if per_sample else 1 for one in forecasts]
        self.model = TimeModel(forecasts, points)
        self.is_fitted = False

    def fit(self, trials: Sequence[Trial]) -> None:
        """Fit the model to all that was measured."""
        good = [trial for trial in trials if math.isfinite(trial.cost)]
        self.is_fitted = bool(good)
        self.model.fit([trial.place for trial in good], [trial.cost * self._units[trial.place] for trial in good])

    def cost(self, place: int) -> Prediction:
        """The predicted cost of a candidate."""
        found = self.model.predict(place)
        return Prediction(found.seconds / self._units[place], found.spread)

    def next(self, left: Sequence[int], trials: Sequence[Trial]) -> int | None:
        """The most promising; the first of the list before anything is known."""
        good = [trial for trial in trials if math.isfinite(trial.cost)]
        suspicion = self._suspicion(left, trials)
        if not good:
            return min(left, key=lambda place: suspicion[place])
        self.fit(trials)
        found = {place: self.cost(place) for place in left}
        best = min(trial.cost for trial in good)
        if len(good) in LOOKS:
            limit = LONGEST_LOOK * max(trial.cost * self._units[trial.place] for trial in good)
            short = [place for place in left if found[place].seconds * self._units[place] <= limit]
            return max(short or left, key=lambda place: found[place].spread)

        def promise(place: int) -> float:
            one = found[place]
            return one.seconds * math.exp(SUSPICION * suspicion[place] - EAGERNESS * min(one.spread, 1.0))

        chosen = min(left, key=promise)
        if len(good) >= FIRST_TRIALS and promise(chosen) > best * (1 - LEAST_GAIN):
            return None
        return chosen

    def _suspicion(self, left: Sequence[int], trials: Sequence[Trial]) -> dict[int, int]:
        """Number of values of each candidate that failed trials have, and no good one."""
        sound, failed = set[tuple[str, str]](), set[tuple[str, str]]()
        for trial in trials:
            (sound if math.isfinite(trial.cost) else failed).update(self._points[trial.place])
        return {place: len((failed - sound) & self._points[place]) for place in left}


class Search:
    """Trials so far, and what comes next; ends by the order, by early stopping, or by the number of trials.

    Args:
        order: of trials.
        places: the candidates that may be tried.
        early_stopping: trials after the best one that end the search; 0: none do.
        most: trials in all.
        earlier: (place, cost) of trials before this search, which only the order looks at.
    """

    def __init__(
        self,
        order: Order,
        places: Sequence[int],
        *,
        early_stopping: int,
        most: int,
        earlier: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._order, self._left = order, list(places)
        self._early_stopping, self._most = early_stopping, most
        self._earlier = [Trial(*one) for one in earlier]
        self.trials: list[Trial] = []
        self.ended = ""

    @property
    def best(self) -> Trial | None:
        """The best trial so far."""
        return min((one for one in self.trials if math.isfinite(one.cost)), key=lambda one: one.cost, default=None)

    def next(self) -> int | None:
        """The place to try next; None if the search is over, and `ended` says why."""
        best = self.best
        since = len(self.trials) - 1 - self.trials.index(best) if best is not None else len(self.trials)
        if not self._left:
            self.ended = "all candidates were tried"
        elif len(self.trials) >= self._most:
            self.ended = "as many trials were made as tuner_num_trials allows"
        elif self._early_stopping and since >= self._early_stopping:
            what = "since the best one were not better" if best is not None else "failed, and none did not"
            self.ended = f"{since} trials {what} (tuner_early_stopping)"
        else:
            place = self._order.next(self._left, [*self._earlier, *self.trials])
            if place is not None:
                return place
            self.ended = "no candidate that is left is predicted to be better"
        return None

    def tell(self, place: int, cost: float) -> None:
        """Note the end of a trial; a cost of infinity is a failure."""
        self._left.remove(place)
        self.trials.append(Trial(place, cost))

    def drop(self, places: Sequence[int]) -> None:
        """Do not try these any more."""
        gone = set(places)
        self._left = [place for place in self._left if place not in gone]

    @property
    def left(self) -> Sequence[int]:
        """Candidates that may still be tried."""
        return tuple(self._left)
