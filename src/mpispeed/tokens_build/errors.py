"""The error of building, and records of inputs that are left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from mpispeed.base.errors import MpispeedError
from mpispeed.base.plain import printable


class BuildError(MpispeedError):
    """A token store cannot be built: what is wrong with an input, an argument or the folder of parts."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file where the system says no: a full disk is told without a name.

    Raises:
        BuildError: for an OSError within.
    """
    try:
        yield
    except OSError as failure:
        msg = f"{printable(str(path))} cannot be written: {failure.strerror or failure}; the same command goes on when "
        msg += "that is put right"
        raise BuildError(msg) from failure


class Faults:
    """Records that cannot be used: the first one ends a build, or all are counted.

    Attributes:
        count: records that were left out.
        first: the place and the problem of the first of them; "" for none.
    """

    def __init__(self, *, are_skipped: bool) -> None:
        self.are_skipped, self.count, self.first = are_skipped, 0, ""

    def bad(self, where: Callable[[], str], problem: str) -> None:
        """Take a record that cannot be used.

        Args:
            where: gives its place in words; called for the first one only, since it may read much.
            problem: what is wrong with it.

        Raises:
            BuildError: such records are not left out.
        """
        if not self.are_skipped:
            msg = f"{where()}: {problem}; correct it, or leave such records out with --skip-bad"
            raise BuildError(msg)
        if not self.count:
            self.first = f"{where()}: {problem}"
        self.count += 1
