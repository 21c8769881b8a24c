"""Files that the first rank writes of parts of all ranks, in their order; a full disk there leaves no rank waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from mpispeed.base.errors import UsageError
from mpispeed.curriculum.index_layout import Array, fit_dtype
from mpispeed.curriculum.index_output import Rows, SamplePair, Sizes, log_percentiles
from mpispeed.curriculum.metrics import Ids
from mpispeed.curriculum.sample_sort import Pairs, sorted_pairs
from mpispeed.mesh.comm import Failures

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

T = TypeVar("T")

_PIECE_BYTES = 8 << 20


def in_order(comm: Comm, values: Array) -> Iterator[Array]:
    """Pieces of the values of all ranks in the order of ranks, on the first rank; others send theirs and get none.

    Collective over: the ranks; types and all but the first dimension are equal. It has to be gone through to the end
    on every rank.
    """
    counts = comm.gather_objects(len(values))
    rows = max(1, _PIECE_BYTES // max(1, values.dtype.itemsize * int(np.prod(values.shape[1:]))))
    for rank, count in enumerate(counts):
        if comm.rank not in (0, rank):
            continue
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            if rank == 0:
                yield values[start:stop]
            elif comm.rank == 0:
                piece = np.empty((stop - start, *values.shape[1:]), values.dtype)
                comm.recv(_bytes(piece), rank)
                yield piece
            else:
                comm.send(_bytes(np.ascontiguousarray(values[start:stop])), 0)


class OrderedWrites(Generic[T]):
    """Something that the first rank makes, fills with pieces of all ranks, and finishes.

    Attributes:
        held: it, on the first rank.
    """

    held: T

    def __init__(self, comm: Comm, make: Callable[[], T]) -> None:
        """Make it on the first rank."""
        self._comm, self._failures = comm, Failures()
        with self._failures.kept():
            if comm.rank == 0:
                self.held = make()

    def add(self, values: Array, write: Callable[[T, Array], object]) -> None:
        """Call `write(held, piece)` on the first rank for pieces of the values of all ranks, in the order of ranks.

        Collective over: the ranks; types and all but the first dimension are equal.
        """
        for piece in in_order(self._comm, values):
            with self._failures.kept():
                if self._failures.first is None:
                    write(self.held, piece)

    def finish(self, end: Callable[[T], object], doing: str) -> None:
        """Call `end(held)` on the first rank.

        Collective over: the ranks.

        Raises:
            UsageError: on all ranks, if a step failed.
        """
        with self._comm.together(UsageError, doing=doing):
            self._failures.raise_first()
            if self._comm.rank == 0:
                end(self.held)


class ValueRows:
    """Different values in ascending order as rows of one, and how many samples have each."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        """Create the files."""
        self._rows = Rows(path, dtype)
        self._values: list[Ids] = []
        self._counts: list[Ids] = []

    def write(self, groups: Ids) -> None:
        """Append groups [n, 2] of values and counts; the first may go on with the value of the last."""
        if self._values and len(groups) and self._values[-1][-1] == groups[0, 0]:
            self._counts[-1][-1] += groups[0, 1]
            groups = groups[1:]
        if len(groups):
            self._rows.write(groups[:, 0])
            self._values.append(groups[:, 0].copy())
            self._counts.append(groups[:, 1].copy())

    def finish(self) -> None:
        """Write the index."""
        self._rows.finish(None, [0, self._rows.count])

    @property
    def values(self) -> Ids:
        """All values."""
        return np.concatenate(self._values)

    @property
    def counts(self) -> Sizes:
        """How many samples have each."""
        return np.concatenate(self._counts)


def write_index_files(comm: Comm, folder: Path, name: str, pairs: Pairs, samples: int) -> None:
    """Write the files of a metric with one value per sample, of which each rank has some, in the order of samples.

    Args:
        comm: the ranks.
        folder: where the files go.
        name: of the metric.
        pairs: values of this rank's samples, and their numbers.
        samples: of all ranks, at least one.

    Collective over: `comm`.

    Raises:
        UsageError: on all ranks, if the first cannot write.
    """
    doing = f"metric {name!r}"
    dtype = fit_dtype(*_limits(comm, pairs.values))
    low, high = _limits(comm, pairs.ids)

    def begin() -> Rows:
        folder.mkdir(parents=True, exist_ok=True)
        return Rows(folder / f"{name}_sample_to_metric", dtype)

    by_sample = OrderedWrites(comm, begin)
    by_sample.add(pairs.values.astype(dtype), Rows.write)
    by_sample.finish(lambda rows: rows.finish(None, [0, samples]), doing)
    pairs = sorted_pairs(comm, pairs)
    by_value = OrderedWrites(comm, lambda: ValueRows(folder / f"{name}_index_to_metric", dtype))
    by_value.add(np.stack(pairs.groups(), axis=1), ValueRows.write)
    by_value.finish(ValueRows.finish, doing)
    number, joined = fit_dtype(low, high), fit_dtype(min(0, low), max(samples - 1, high))
    numbers = OrderedWrites(comm, lambda: SamplePair(folder, name, number, joined))
    numbers.add(pairs.ids.astype(number), SamplePair.write)

    def finish(files: SamplePair) -> None:
        sizes = by_value.held.counts
        files.finish(sizes, [0, len(sizes)])
        log_percentiles(name, by_value.held.values, sizes)

    numbers.finish(finish, doing)


def _limits(comm: Comm, values: Array) -> tuple[int, int]:
    """The smallest and the largest value of all ranks, one of which has some. Collective over: `comm`."""
    limits = np.iinfo(np.int64)
    low = torch.tensor([values.min() if len(values) else limits.max])
    high = torch.tensor([values.max() if len(values) else limits.min])
    comm.all_reduce(low, "min")
    comm.all_reduce(high, "max")
    return int(low), int(high)


def _bytes(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1).view(np.uint8))
