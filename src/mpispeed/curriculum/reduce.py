"""The reduce step of the analyzer over files: map files of all workers and threads become one set of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpispeed.base.errors import UsageError
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.index_layout import PIECE_ROWS, Array, fit_dtype
from mpispeed.curriculum.index_output import Rows, SamplePair, Sizes, chunk_marks, log_percentiles
from mpispeed.curriculum.metrics import Ids, split

Place = tuple[int, int]
"""Worker and thread."""
Spans = Mapping[Place, tuple[int, int]]
"""Samples of each thread, in the order of samples."""

_VALUES_AT_ONCE = 4096


@dataclass(frozen=True)
class MapFiles:
    """Names of the files of a metric in the folder of all."""

    root: Path
    name: str

    @property
    def joined(self) -> Path:
        """The folder of results."""
        return self.root / self.name

    def folder(self, worker: int, thread: int) -> Path:
        """The folder of a thread."""
        return self.joined / f"worker{worker}_thread{thread}"

    def opened(self, place: Place, what: str) -> MMapIndexedDataset:
        """A file of rows that a thread has left.

        Raises:
            UsageError: it has not.
            IndexFileError: it is damaged.
        """
        path = self.folder(*place) / f"{self.name}_{what}"
        if not MMapIndexedDataset.exists(path):
            msg = f"metric {self.name!r}: {path}.bin and .idx are missing; run the map step of worker {place[0]} first"
            raise UsageError(msg)
        return MMapIndexedDataset(path)


def read_sum(files: MapFiles, place: Place) -> Array:
    """The sum of a thread."""
    total: Array = files.opened(place, "metric_value")[0]
    return total


def reduce_values(files: MapFiles, spans: Spans, samples: int, threads: int) -> None:
    """Write the files of a metric with one value per sample.

    Raises:
        UsageError: map files are missing or of another data set.
        IndexFileError: they are damaged.
    """
    values, counts = _different(files, spans, samples)
    dtype = fit_dtype(int(values[0]), int(values[-1]))
    joined = Rows(files.joined / f"{files.name}_sample_to_metric", dtype)
    places = list(spans)
    parts = []
    for start, stop in split(0, len(places), threads):
        before = joined.count
        for place in places[start:stop]:
            for piece in _pieces(files, spans, place):
                joined.write(piece)
        parts.append(joined.count - before)
    joined.finish(None, chunk_marks(parts))

    marks = chunk_marks([stop - start for start, stop in split(0, len(values), threads)])
    index = Rows(files.joined / f"{files.name}_index_to_metric", dtype)
    index.write(values)
    index.finish(None, marks)
    _write_samples(files, spans, values, counts, (samples, threads, marks))
    log_percentiles(files.name, values, counts)


def _different(files: MapFiles, spans: Spans, samples: int) -> tuple[Array, Sizes]:
    """Different values in ascending order, and how many samples have each."""
    found: list[Array] = []
    numbers: list[Array] = []
    for place in spans:
        for piece in _pieces(files, spans, place):
            those, count = np.unique(piece, return_counts=True)
            found.append(those)
            numbers.append(count)
    if not found:
        msg = f"metric {files.name!r}: a data set without samples has no values"
        raise UsageError(msg)
    values, inverse = np.unique(np.concatenate(found), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, inverse, np.concatenate(numbers))
    if int(counts.sum()) != samples:
        msg = f"metric {files.name!r}: map files have {int(counts.sum())} values, the data set has {samples} samples"
        raise UsageError(msg)
    return values, counts


def _pieces(files: MapFiles, spans: Spans, place: Place) -> Iterator[Array]:
    """Values of a thread's samples in their order."""
    start, stop = spans[place]
    if start == stop:
        return
    data = files.opened(place, "sample_to_metric")
    if len(data) != stop - start:
        msg = (
            f"metric {files.name!r}: worker {place[0]}, thread {place[1]} left {len(data)} values for "
            f"{stop - start} samples; its map step did not end, or was for another data set"
        )
        raise UsageError(msg)
    for first in range(0, len(data), PIECE_ROWS):
        values, sizes = data.read(first, min(first + PIECE_ROWS, len(data)))
        if (sizes != 1).any():
            msg = f"metric {files.name!r}: {data.path} has rows of other lengths than 1"
            raise UsageError(msg)
        yield values


def _write_samples(
    files: MapFiles, spans: Spans, values: Array, counts: Sizes, facts: tuple[int, int, list[int]]
) -> None:
    """Numbers of samples in the order of their values, as rows of values and as joined rows."""
    samples, threads, marks = facts
    folders = [files.folder(*place) for place, (start, stop) in spans.items() if start < stop]
    names = {folder: {path.name for path in folder.iterdir()} for folder in folders}

    def ids_of(value: int) -> Ids:
        name = f"{files.name}_metric_to_sample_{value}.csv"
        return np.concatenate(
            [np.empty(0, np.int64), *(read_ids(path / name) for path in folders if name in names[path])]
        )

    low, high = 0, samples - 1
    is_written = False
    with ThreadPoolExecutor(threads, "reduce") as pool:
        while not is_written:
            pair = SamplePair(files.joined, files.name, fit_dtype(low, high))
            is_written = True
            for start in range(0, len(values), _VALUES_AT_ONCE):
                those = values[start : start + _VALUES_AT_ONCE].tolist()
                found = list(pool.map(ids_of, those))
                for value, ids, count in zip(those, found, counts[start:], strict=False):
                    _check_count(files, value, len(ids), int(count))
                ids = np.concatenate(found)
                if ids.min() < low or ids.max() > high:  # numbers that are no positions: once more with a wider type
                    low, high, is_written = min(low, int(ids.min())), max(high, int(ids.max())), False
                    break
                pair.write(ids)
    pair.finish(counts, marks)


def read_ids(path: Path) -> Ids:
    """Numbers of samples in a text file of a value.

    Raises:
        UsageError: it holds something else.
    """
    try:
        return np.array(path.read_bytes().replace(b"\r\n", b",").rstrip(b",").split(b",")).astype(np.int64)
    except (ValueError, OverflowError) as failure:
        msg = f"{path} does not hold numbers of samples only: {failure}"
        raise UsageError(msg) from failure


def _check_count(files: MapFiles, value: int, found: int, count: int) -> None:
    if found != count:
        msg = f"metric {files.name!r}: {count} samples have the value {value}, but {found} are listed for it"
        raise UsageError(msg)
