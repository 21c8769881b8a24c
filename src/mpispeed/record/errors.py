"""Exceptions of run records."""

from __future__ import annotations

from mpispeed.base.errors import MpispeedError
from mpispeed.base.plain import printable

_MOST_SIGNS = 1000


class RecordError(MpispeedError, ValueError):
    """A file is no run record, is damaged, or lacks what is asked for; one line without control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MOST_SIGNS))


class NoRecord(RecordError):
    """There is no run record at this place."""
