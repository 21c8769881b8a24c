"""Several data sets as one, mixed by weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mpispeed.base.errors import ConfigError
from mpispeed.tokens.samples import BatchedSamples, Sample
from mpispeed.tokens.splits import largest_remainder

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 1 << 16
"""Samples after which the pattern of data sets repeats."""


class TokenBlend(BatchedSamples):
    """Samples of several data sets, each in its own order and over again when it ends.

    The numbers of samples are cut into blocks of 65536. In a block each data set has the number of places that its
    weight gives it by the largest remainder, spread evenly. Sample i is found by a division and two small tables, so
    that nothing is computed in advance.
    """

    def __init__(self, parts: Sequence[tuple[BatchedSamples, float]], *, length: int | None = None) -> None:
        """Mix data sets.

        Args:
            parts: data sets whose samples are alike, with their weights.
            length: number of samples; by default as many as all data sets have together.

        Raises:
            ConfigError: weights that give no proportions, or so small a one that it would get no sample.
        """
        if not parts:
            msg = "a blend of no data sets was asked for; give pairs of a data set and its weight"
            raise ConfigError(msg)
        self.datasets = [dataset for dataset, _ in parts]
        weights = [weight for _, weight in parts]
        self.counts = np.array(largest_remainder(BLOCK, weights), np.int64)
        for number, (weight, count) in enumerate(zip(weights, self.counts.tolist(), strict=True)):
            if not count:
                msg = f"data set {number} of a blend has the weight {weight} of {sum(weights)}, below 1 in {BLOCK}"
                raise ConfigError(msg)
        self._lengths = np.array([len(dataset) for dataset in self.datasets], np.int64)
        self._length = int(self._lengths.sum()) if length is None else length
        self._choices, self._places = _pattern(self.counts)

    def __len__(self) -> int:
        return self._length

    def files(self) -> list[Path]:
        """The files of its data sets."""
        return list(dict.fromkeys(path for dataset in self.datasets for path in dataset.files()))

    def reopened(self, paths: Mapping[str, str]) -> Self:
        """As `BatchedSamples.reopened`."""
        found = copy.copy(self)
        found.datasets = [dataset.reopened(paths) for dataset in self.datasets]
        return found

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Data set of each sample, and which of its samples that is."""
        blocks, places = np.divmod(numbers, BLOCK)
        chosen = self._choices[places].astype(np.int64)
        return chosen, (blocks * self.counts[chosen] + self._places[places]) % self._lengths[chosen]

    def _read(self, numbers: NDArray[np.int64]) -> Sample:
        chosen, own = self.locate(numbers)
        sample: Sample = {}
        for number in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == number)
            found = self.datasets[number].read_batch(own[rows])
            if len(rows) == len(numbers):
                return found
            if sample and sample.keys() != found.keys():
                msg = f"data sets of a blend differ: one gives {', '.join(sample)}, another {', '.join(found)}"
                raise ConfigError(msg)
            for name, values in found.items():
                if name not in sample:
                    sample[name] = values.new_empty((len(numbers), *values.shape[1:]))
                elif sample[name].shape[1:] != values.shape[1:]:
                    shapes = [list(each.shape[1:]) for each in (sample[name], values)]
                    msg = f"data sets of a blend differ: {name} of one sample has shape {shapes[0]}, and {shapes[1]} "
                    msg += f"of another, from data set {number}; give all of them one length"
                    raise ConfigError(msg)
                sample[name][torch.from_numpy(rows)] = values
        return sample


def _pattern(counts: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Data set of each place of a block, and how many places of that data set come before.

    The j-th place of a data set with c of n is wanted at (j + 1/2) n / c; places are given in the order of these
    wishes.
    """
    chosen = np.repeat(np.arange(len(counts)), counts)
    before = np.concatenate([np.arange(count) for count in counts.tolist()])
    # doubles tell these apart: two of them that differ do so by 1 / n**2 or more
    order = np.lexsort((chosen, (2 * before + 1) / counts[chosen]))
    return chosen[order].astype(np.uint16), before[order]
