"""Samples by difficulty: what is admitted, in clusters of samples that are admitted together.

A metric admits a beginning of the order of its index, so that what is admitted at a time is one number for each metric,
its end, and a cluster is what two such tuples of ends differ by. Source of the rules: DeepSpeed's documentation of its
data efficiency library, and Li et al., "DeepSpeed Data Efficiency", arXiv 2212.03597, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from mpispeed.curriculum.difficulty_index import DifficultyIndex, Numbers

if TYPE_CHECKING:
    from mpispeed.curriculum.cluster_files import ClusterFiles
    from mpispeed.curriculum.schedule import CurriculumScheduler

Ends = tuple[int, ...]
"""How many samples each clustered metric admits, in the order of the metrics; before the first cluster zeros."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure of difficulty.

    Attributes:
        name: unique.
        schedule: difficulty by step.
        index: the samples in its order; None for a single cluster: it chooses no samples.
        is_percentile: difficulties are percentiles of samples, not values of the metric.
    """

    name: str
    schedule: CurriculumScheduler
    index: DifficultyIndex | None
    is_percentile: bool = False


@dataclass(frozen=True, slots=True)
class _Admitting:
    """A metric with an index, and its number among all metrics."""

    number: int
    metric: Metric
    index: DifficultyIndex

    def end(self, difficulties: Sequence[int]) -> int:
        """Number of samples that it admits."""
        difficulty = difficulties[self.number]
        if self.metric.is_percentile:
            return self.index.admitted_by_percentile(difficulty, self.metric.schedule.max_difficulty)
        return self.index.admitted_by_value(difficulty)


class Clusters(Protocol):
    """Samples by what difficulties admit. Calls are local, and give the same on every rank that has the same files."""

    def first_ends(self) -> Ends:
        """The ends of nothing."""

    def ends(self, difficulties: Sequence[int]) -> Ends:
        """What the difficulties of all metrics admit."""

    def size(self, before: Ends, after: Ends) -> int:
        """Number of samples of a cluster."""

    def take(self, before: Ends, after: Ends, places: Numbers) -> Numbers:
        """Samples of a cluster, by their places [n] in it."""

    def digest(self) -> str:
        """A short word that is another if the clusters may be others."""


def make_clusters(metrics: Sequence[Metric], samples: int, files: ClusterFiles | None) -> Clusters:
    """The clusters of metrics; `files` keeps those of several metrics with indexes, others need none.

    Raises:
        ValueError: there are several such metrics, and no files.
    """
    found = [_Admitting(number, each, each.index) for number, each in enumerate(metrics) if each.index is not None]
    if not found:
        return AllSamples(samples)
    if len(found) == 1:
        return OneMetric(found[0])
    if files is None:
        msg = "clusters of several metrics need a folder"
        raise ValueError(msg)
    return SeveralMetrics(found, samples, files)


class AllSamples:
    """One cluster of all samples: no metric chooses any."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def first_ends(self) -> Ends:
        """One number, as if a metric were there."""
        return (0,)

    def ends(self, difficulties: Sequence[int]) -> Ends:
        """All samples at once."""
        return (self._samples,)

    def size(self, before: Ends, after: Ends) -> int:
        """All of them, or none."""
        return after[0] - before[0]

    def take(self, before: Ends, after: Ends, places: Numbers) -> Numbers:
        """The places themselves."""
        return before[0] + places

    def digest(self) -> str:
        """Their number."""
        return f"all {self._samples}"


class OneMetric:
    """Clusters that are ranges of the order of one metric's index."""

    def __init__(self, admitting: _Admitting) -> None:
        self._admitting = admitting
        self._digest = admitting.index.digest()  # states have it, and functions of batches get one with each

    def first_ends(self) -> Ends:
        """Zero."""
        return (0,)

    def ends(self, difficulties: Sequence[int]) -> Ends:
        """By the index. Raises IndexFileError."""
        return (self._admitting.end(difficulties),)

    def size(self, before: Ends, after: Ends) -> int:
        """The length of the range."""
        return after[0] - before[0]

    def take(self, before: Ends, after: Ends, places: Numbers) -> Numbers:
        """Read from the index. Raises IndexFileError."""
        return self._admitting.index.take(before[0] + places)

    def digest(self) -> str:
        """That of the index."""
        return self._digest


class SeveralMetrics:
    """Clusters of samples that all metrics admit now, and did not all admit before; kept in files."""

    def __init__(self, admitting: Sequence[_Admitting], samples: int, files: ClusterFiles) -> None:
        self._admitting, self._samples, self._files = admitting, samples, files
        self._indexes = [each.index for each in admitting]
        self._digests = [each.index.digest() for each in admitting]

    def first_ends(self) -> Ends:
        """Zeros."""
        return (0,) * len(self._admitting)

    def ends(self, difficulties: Sequence[int]) -> Ends:
        """By the indexes. Raises IndexFileError."""
        return tuple(each.end(difficulties) for each in self._admitting)

    def size(self, before: Ends, after: Ends) -> int:
        """By the file of the cluster, which is made if it is missing. Raises IndexFileError."""
        return self._files.count(self._describe(before, after), lambda: joint(self._indexes, before, after))

    def take(self, before: Ends, after: Ends, places: Numbers) -> Numbers:
        """Read from the file of the cluster, which is made if it is missing. Raises IndexFileError."""
        return self._files.take(self._describe(before, after), lambda: joint(self._indexes, before, after), places)

    def digest(self) -> str:
        """Those of the indexes."""
        return " ".join(self._digests)

    def _describe(self, before: Ends, after: Ends) -> Mapping[str, object]:
        metrics = [
            {"name": each.metric.name, "index": self._digests[n], "before": before[n], "after": after[n]}
            for n, each in enumerate(self._admitting)
        ]
        return {"samples": self._samples, "metrics": metrics}


def joint(indexes: Sequence[DifficultyIndex], before: Ends, after: Ends) -> npt.NDArray[np.bool_]:
    """True for the samples [samples] that all indexes admit up to `after`, and not all up to `before`.

    Two bytes of memory for each sample of the data set.

    Raises:
        IndexFileError: an index is damaged.
    """
    found = _admitted(indexes, after)
    if all(before):
        found &= ~_admitted(indexes, before)
    return found


def _admitted(indexes: Sequence[DifficultyIndex], ends: Ends) -> npt.NDArray[np.bool_]:
    passed = np.zeros(indexes[0].samples, np.uint8)  # how many of the indexes, one after another, admit a sample
    for number, (index, end) in enumerate(zip(indexes, ends, strict=True)):
        for piece in index.read(0, end):
            passed[piece[passed[piece] == number]] = number + 1
    return passed == len(indexes)
