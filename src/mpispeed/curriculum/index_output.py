"""Files of a metric that curricula read: which samples have which value, as DeepSpeed's analyzers write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder, write_index
from mpispeed.curriculum.index_layout import MOST_VALUES, Array, IndexFileError, OutFile, data_path, fitted, index_path

log = logging.getLogger(__name__)

Sizes = npt.NDArray[np.int64]
"""Lengths of rows."""


class Rows:
    """A pair of files whose values are written piece by piece, and whose rows are told at the end.

    Attributes:
        count: values so far.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Create `path`.bin."""
        self._path, self._dtype = path, dtype
        index_path(path).unlink(missing_ok=True)  # of an older pair
        self._file = OutFile(data_path(path))
        self.count = 0

    def write(self, values: Array) -> None:
        """Append values; one that does not fit the type is an IndexFileError."""
        self._file.write(fitted(values, self._dtype, self._path))
        self.count += len(values)

    def finish(self, sizes: Sizes | None, marks: Iterable[int]) -> None:
        """Write the index: lengths of rows, by default one value each, and document marks."""
        self._file.close()
        if sizes is not None and len(sizes) and sizes.max() > MOST_VALUES:
            msg = f"{self._path}: {sizes.max()} samples have one value; a row holds {MOST_VALUES}"
            raise IndexFileError(msg)
        lengths = np.broadcast_to(np.int32(1), (self.count,)) if sizes is None else sizes.astype(np.int32)
        write_index(index_path(self._path), self._dtype, lengths, np.fromiter(marks, np.int64))


class SamplePair:
    """The two files of numbers of samples in the order of their values: a row a value, and joined rows."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], joined_dtype: np.dtype[Any] | None = None
    ) -> None:
        """Create both; `joined_dtype` is that of the second if it differs."""
        self._rows = Rows(folder / f"{name}_index_to_sample", dtype)
        self._joined = Rows(folder / f"{name}_index_to_sample_percentile_merged", joined_dtype or dtype)

    def write(self, ids: Array) -> None:
        """Append numbers of samples."""
        self._rows.write(ids)
        self._joined.write(ids)

    def finish(self, sizes: Sizes, marks: Iterable[int]) -> None:
        """Write both indices for rows of these lengths; `marks` are those of the first file."""
        self._rows.finish(sizes, marks)
        joined = percentile_sizes(sizes)
        self._joined.finish(joined, [0, len(joined)])


def percentile_sizes(sizes: Sizes) -> Sizes:
    """Lengths of rows that are joined to about a hundred: each `max(1, rows // 100)` rows one after another."""
    step = max(1, len(sizes) // 100)
    if not len(sizes):
        return sizes
    return np.add.reduceat(sizes, np.arange(0, len(sizes), step), dtype=np.int64)


def write_sum(folder: Path, name: str, total: Array, dtype: np.dtype[Any]) -> None:
    """Write the sum of a metric that is accumulated."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_metric_value"
    builder = MMapIndexedDatasetBuilder(data_path(path), dtype)
    builder.add_item_numpy(total.reshape(-1))
    builder.end_document()
    builder.finalize(index_path(path))


def log_percentiles(name: str, values: Array, sizes: Sizes) -> None:
    """Log the values at each twentieth of the samples."""
    if not len(sizes):
        return
    ends = np.cumsum(sizes, dtype=np.int64)
    wanted = np.arange(5, 101, 5)
    found = values[np.searchsorted(ends * 100, wanted * ends[-1])]
    log.info("metric %s: %s", name, ", ".join(f"{at} %: {value}" for at, value in zip(wanted, found, strict=True)))


def chunk_marks(counts: Sequence[int]) -> list[int]:
    """Document marks of a file that was joined of parts with so many rows each: their ends, the last one twice."""
    ends = [int(end) for end in np.cumsum(counts)]
    return [0, *ends, ends[-1]]
