"""The samples of a data set in the order of a measure of difficulty, as the analyzer has written them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpispeed.curriculum.index_file import IndexFileError, MMapIndexedDataset, data_path, index_path

Numbers = npt.NDArray[np.int64]

PIECE = 1 << 20
"""Samples that are read at a time."""

_BLOCKS, _BLOCK_BYTES = 64, 4096


class DifficultyIndex:
    """A metric's index files: sample numbers by growing difficulty. Nothing is held but two descriptors.

    Row i of `index_to_sample` has the samples with the i-th smallest value, row i of `index_to_metric` that value. One
    after another the rows are all samples of the data set in the order of the metric, so that what a difficulty admits
    is a beginning of them.

    Attributes:
        samples: of the data set.
        path: that of `index_to_sample`.
    """

    def __init__(
        self, index_to_sample: MMapIndexedDataset, index_to_metric: MMapIndexedDataset | None, samples: int
    ) -> None:
        """Check the files against each other and the data set.

        Args:
            index_to_sample: rows of samples.
            index_to_metric: rows of one value each; None if difficulties are percentiles.
            samples: of the data set.

        Raises:
            IndexFileError: the two do not fit each other, or the data set has another number of samples.
        """
        self.samples, self.path = samples, index_to_sample.path
        self._order, self._values = index_to_sample, index_to_metric
        count = self._order.value_count
        if count != samples:
            msg = f"{self.path} has {count} samples, and the data set {samples}; analyze this data set again"
            raise IndexFileError(msg)
        if index_to_metric is not None:
            rows, values, lines = len(self._order), index_to_metric.value_count, len(index_to_metric)
            if not rows == values == lines:
                msg = (
                    f"{index_to_metric.path} has {values} values in {lines} rows, and {self.path} {rows} rows, where "
                    "each row should have one value; rows that are merged (..._percentile_merged) are for "
                    "difficulty_type percentile only"
                )
                raise IndexFileError(msg)

    def admitted_by_value(self, most: int) -> int:
        """Number of samples whose value is at most `most`.

        Raises:
            IndexFileError: a row that was looked at is damaged.
        """
        values = self._values
        if values is None:
            msg = f"values of {self.path} are not known without index_to_metric"
            raise ValueError(msg)
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            if int(values.read_values(middle, middle + 1)[0]) <= most:
                low = middle + 1
            else:
                high = middle
        return self._order.first_value(low)

    def admitted_by_percentile(self, percentile: int, most: int) -> int:
        """Number of samples up to a percentile of `most`, at which it is all of them.

        As in DeepSpeed each percentile has samples // most of them; where that is none, the share is rounded down.
        """
        if percentile >= most:
            return self.samples
        return (self.samples // most * percentile) or self.samples * percentile // most

    def read(self, start: int, stop: int) -> Iterator[Numbers]:
        """Sample numbers at places `start` to `stop` of the order, piece by piece.

        Raises:
            IndexFileError: one is no number of a sample.
        """
        for begin in range(start, stop, PIECE):
            yield self._checked(self._order.read_values(begin, min(begin + PIECE, stop)))

    def take(self, places: Numbers) -> Numbers:
        """Sample numbers at single places [n], by one small read each.

        Raises:
            IndexFileError: one is no number of a sample.
        """
        found = [self._order.read_values(place, place + 1) for place in places.tolist()]
        return self._checked(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _checked(self, found: npt.NDArray[Any]) -> Numbers:
        low, high = (int(found.min()), int(found.max())) if found.size else (0, 0)
        if low < 0 or high >= self.samples:
            wrong = low if low < 0 else high
            msg = f"{self.path} names sample {wrong} of a data set of {self.samples}; the file is damaged"
            raise IndexFileError(msg)
        return found.astype(np.int64)

    def digest(self) -> str:
        """A short word that tells files apart: of their sizes, and of 64 blocks spread over each."""
        found = hashlib.blake2b(digest_size=12)
        for reader in (self._order, self._values):
            if reader is not None:
                for path in (index_path(reader.path), data_path(reader.path)):
                    _digest_blocks(found, path)
        return found.hexdigest()


def _digest_blocks(found: hashlib.blake2b, path: Path) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "little"))
            last = max(0, size - _BLOCK_BYTES)
            for place in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
                found.update(os.pread(file.fileno(), _BLOCK_BYTES, place))
    except OSError as failure:
        msg = f"{path} cannot be read: {failure.strerror}"
        raise IndexFileError(msg) from failure
