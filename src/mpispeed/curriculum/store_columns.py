"""Columns of a token store made of values that all ranks have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.errors import UsageError
from mpispeed.curriculum.index_layout import Array
from mpispeed.curriculum.ordered_writes import in_order
from mpispeed.mesh.comm import Failures
from mpispeed.tokens.columns import add_column

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


def add_to_store(comm: Comm, path: Path, name: str, values: Array) -> None:
    """Add values of documents, of which each rank has some in their order, to a store as a column.

    Collective over: `comm`.

    Raises:
        UsageError: on all ranks, if the first cannot add it.
    """
    kinds = set(comm.gather_objects(values.dtype.str[1:] if len(values) else ""))
    # of whole numbers on one rank and others on another: what holds both
    dtype = np.result_type(*sorted(kinds - {""}) or ["i8"]).str[1:]
    pieces, failures = in_order(comm, values.astype(dtype)), Failures()
    with failures.kept():
        if comm.rank == 0:
            add_column(path, name, pieces, dtype=dtype)
    for _ in pieces:  # what is left of them is on its way
        pass
    with comm.together(UsageError, doing=f"column {name!r}"):
        failures.raise_first()
