"""Mistakes of the script or the config: found on any rank, they end `initialize` on all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import agree_by_texts, together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpispeed.mesh.comm import Comm


@contextmanager
def configuring(comm: Comm) -> Iterator[None]:
    """Context of a step of this rank that raises ConfigError on all ranks if it fails on one.

    A rank that failed by an error derived from it raises that, which scripts may catch. What all ranks have raised
    alike is told once.

    Collective over: all ranks of `comm`, at the end of the step.
    """
    try:
        with together(agree_by_texts(comm.gather_objects), ConfigError):
            yield
    except ConfigError as told:
        own = type(told.__cause__)
        if not issubclass(own, ConfigError):
            raise
        error = own(str(told))
        error.is_collective = told.is_collective
        raise error from told.__cause__
