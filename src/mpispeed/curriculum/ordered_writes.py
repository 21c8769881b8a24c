"""Files that the first rank writes of parts of all ranks, in their order; a full disk there leaves no rank waiting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from mpispeed.base.errors import UsageError
from mpispeed.curriculum.index_layout import Array
from mpispeed.curriculum.index_output import Rows, Sizes
from mpispeed.curriculum.metrics import Ids
from mpispeed.mesh.comm import Failures

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

T = TypeVar("T")

_PIECE_BYTES = 8 << 20


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
        counts = self._comm.gather_objects(len(values))
        rows = max(1, _PIECE_BYTES // max(1, values.dtype.itemsize * int(np.prod(values.shape[1:]))))
        for rank, count in enumerate(counts):
            if self._comm.rank not in (0, rank):
                continue
            for start in range(0, count, rows):
                stop = min(start + rows, count)
                if rank == 0:
                    piece = values[start:stop]
                elif self._comm.rank == 0:
                    piece = np.empty((stop - start, *values.shape[1:]), values.dtype)
                    self._comm.recv(_bytes(piece), rank)
                else:
                    self._comm.send(_bytes(np.ascontiguousarray(values[start:stop])), 0)
                    continue
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


def _bytes(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1).view(np.uint8))
