"""The samples of all global batches: a pure function of the seed, the difficulties and the place in the stream.

A sample of a batch is of a cluster that is drawn with a probability in proportion to its size, and the next one of that
cluster in its own shuffled order, so that each sample of a cluster comes before one comes again. Draws and orders are
keyed by numbers of samples, clusters and passes; what ranks, micro-batches and accumulation are does not enter, and no
rank has to tell another. Source of the rules: DeepSpeed's documentation of its data efficiency library.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpispeed.base.errors import ConfigError
from mpispeed.base.keyed_order import mix, permuted, seed_word
from mpispeed.curriculum.clusters import Clusters, Ends, Metric
from mpispeed.curriculum.difficulty_index import Numbers

_DRAW, _ORDER = np.uint64(0x5851F42D4C957F2D), np.uint64(0x14057B7EF767814F)
"""Salts: of draws of clusters, and of orders within clusters."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Samples that are admitted together.

    Attributes:
        before: the ends of the clusters before it.
        after: its own.
        size: number of its samples.
    """

    before: Ends
    after: Ends
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the stream, between two global batches.

    Attributes:
        step: global batches before it.
        consumed: samples before it.
        difficulties: of the batch before it, in the order of the metrics; empty at the start.
        clusters: so far.
        positions: samples taken of each cluster so far, of all passes over it.
    """

    step: int = 0
    consumed: int = 0
    difficulties: tuple[int, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    positions: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch.

    Attributes:
        place: that before it.
        step: its number, from 1.
        difficulties: by metric.
        clusters: those that it is drawn from.
        numbers: [samples] the cluster of each sample.
        places: [samples] its place among all that are ever taken of the cluster.
    """

    place: Place
    step: int
    difficulties: Mapping[str, int]
    clusters: tuple[Cluster, ...]
    numbers: Numbers
    places: Numbers


class SampleStream:
    """Makes global batches. Changes nothing, and keeps no place: that is handed in and out."""

    def __init__(self, metrics: Sequence[Metric], clusters: Clusters, seed: int) -> None:
        self.metrics, self.clusters, self.seed = metrics, clusters, seed
        self._word = seed_word(seed)

    def after(self, place: Place, count: int) -> tuple[Batch, Place]:
        """The global batch of `count` samples at a place, and the place after it.

        Raises:
            ConfigError: no sample is as easy as the first difficulties ask for.
            IndexFileError: an index or a cluster cannot be read.
            UsageError: the function of a custom schedule is missing, or gives no whole number.
        """
        step = place.step + 1
        difficulties = self._difficulties(place, step)
        clusters, positions = self._grown(place, difficulties)
        sizes = np.array([cluster.size for cluster in clusters], np.uint64)
        bounds = np.cumsum(sizes)
        samples = np.arange(place.consumed, place.consumed + count, dtype=np.uint64)
        draws = mix(mix(samples + _DRAW) ^ self._word) % bounds[-1]
        numbers = np.searchsorted(bounds, draws, side="right")
        counts = np.bincount(numbers, minlength=len(clusters))
        by_cluster = np.argsort(numbers, kind="stable")
        places = np.empty(count, np.int64)
        places[by_cluster] = np.arange(count) + np.repeat(positions - (np.cumsum(counts) - counts), counts)
        named = dict(zip(self._names(), difficulties, strict=True))
        following = Place(step, place.consumed + count, difficulties, clusters, positions + counts)
        return Batch(place, step, named, clusters, numbers, places), following

    def samples(self, batch: Batch, start: int, stop: int) -> list[int]:
        """Data set indices of the samples `start` to `stop` of a batch. Raises IndexFileError."""
        numbers = batch.numbers[start:stop]
        sizes = np.array([cluster.size for cluster in batch.clusters], np.uint64)[numbers]
        passes, offsets = np.divmod(batch.places[start:stop].astype(np.uint64), sizes)
        keys = mix(mix(mix(passes + np.uint64(1)) ^ numbers.astype(np.uint64)) ^ (self._word ^ _ORDER))
        inside = permuted(offsets, sizes, keys).astype(np.int64)
        found = np.empty(len(numbers), np.int64)
        for number in np.unique(numbers).tolist():
            cluster, where = batch.clusters[number], numbers == number
            found[where] = self.clusters.take(cluster.before, cluster.after, inside[where])
        return [int(sample) for sample in found]

    def named(self, place: Place) -> dict[str, int]:
        """The difficulties before a place, by metric; empty at the start."""
        return dict(zip(self._names(), place.difficulties, strict=False))

    def with_seed(self, seed: int) -> SampleStream:
        """The stream of another seed."""
        return SampleStream(self.metrics, self.clusters, seed)

    def values_of(self, place: Place) -> dict[str, Any]:
        """A place as plain values, from which `place_of` makes it again."""
        return {
            "step": place.step,
            "consumed": place.consumed,
            "difficulties": self.named(place),
            "ends": [list(cluster.after) for cluster in place.clusters],
            "sizes": [cluster.size for cluster in place.clusters],
            "positions": place.positions.tolist(),
            "seed": self.seed,
            "of": self.clusters.digest(),
        }

    def place_of(self, values: Mapping[str, Any]) -> Place:
        """The place that `values_of` has told.

        Raises:
            ConfigError: it is none of these metrics and their files.
        """
        step, consumed = (_whole(values[key], key) for key in ("step", "consumed"))
        told, names = values["difficulties"], self._names()
        if step and sorted(told) != sorted(names):
            what = f"metrics {', '.join(told) or 'none'}, and the config has {', '.join(names) or 'none'}"
            raise ConfigError(_others(what))
        if values["of"] != self.clusters.digest():
            raise ConfigError(_others("other index files or data than there are now"))
        difficulties = tuple(_whole(told[name], "difficulty") for name in names if name in told)
        ends = [tuple(_whole(end, "end") for end in each) for each in values["ends"]]
        sizes, positions = ([_whole(each, key) for each in values[key]] for key in ("sizes", "positions"))
        before = [self.clusters.first_ends(), *ends[:-1]]
        is_whole = len(ends) == len(sizes) == len(positions) and bool(ends) == bool(step)
        if not (is_whole and all(sizes) and all(map(_grows, before, ends))):
            raise ConfigError(_others("numbers that do not fit each other"))
        clusters = tuple(map(Cluster, before, ends, sizes)) if ends else ()
        return Place(step, consumed, difficulties, clusters, np.array(positions, np.int64))

    def _names(self) -> list[str]:
        return [metric.name for metric in self.metrics]

    def _difficulties(self, place: Place, step: int) -> tuple[int, ...]:
        """Those of a step; one that has reached its maximum stays."""
        if not place.difficulties:
            return tuple(metric.schedule.difficulty_at(step) for metric in self.metrics)
        return tuple(
            now if now >= metric.schedule.max_difficulty else metric.schedule.difficulty_at(step)
            for now, metric in zip(place.difficulties, self.metrics, strict=True)
        )

    def _grown(self, place: Place, difficulties: tuple[int, ...]) -> tuple[tuple[Cluster, ...], Numbers]:
        """Clusters and positions with the cluster of new difficulties; what was admitted once stays."""
        if difficulties == place.difficulties and place.clusters:
            return place.clusters, place.positions
        before = place.clusters[-1].after if place.clusters else self.clusters.first_ends()
        after = tuple(map(max, before, self.clusters.ends(difficulties)))
        size = self.clusters.size(before, after) if after != before else 0
        if size:
            return (*place.clusters, Cluster(before, after, size)), np.append(place.positions, 0)
        if not place.clusters:
            asked = ", ".join(f"{m.name} {d}" for m, d in zip(self.metrics, difficulties, strict=True))
            msg = (
                f"no sample is admitted by the first difficulties of the curriculum ({asked}); raise min_difficulty, "
                "or look at the index files"
            )
            raise ConfigError(msg)
        return place.clusters, place.positions


def _grows(before: Ends, after: Ends) -> bool:
    return len(before) == len(after) and before != after and all(map(operator.le, before, after))


def _others(what: str) -> str:
    return (
        f"the saved place in the curriculum of data_efficiency is of {what}; restore them, or begin the data anew with "
        "load_checkpoint(..., load_data_state=False)"
    )


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(_others(f"the {key} {value!r}"))
    return value
