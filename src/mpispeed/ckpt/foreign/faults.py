"""Exceptions of foreign checkpoints; each is also the built-in error that users of DeepSpeed's functions catch."""

from __future__ import annotations

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint

_MOST_SIGNS = 2000


class ForeignFault(CheckpointError):
    """Base of errors of foreign checkpoints; shortens messages and escapes their characters."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MOST_SIGNS))


class ForeignMismatch(ForeignFault, ValueError):
    """Parts of a foreign checkpoint contradict each other, or cannot be converted."""


class ForeignMissing(ForeignFault, FileNotFoundError):
    """A folder or file of a foreign checkpoint is not there."""


class ForeignIncomplete(ForeignFault, IncompleteCheckpoint, ValueError):
    """Files of some ranks are missing, or are of another save."""


class ForeignCorrupt(ForeignFault, CorruptCheckpoint, ValueError):
    """A file of a foreign checkpoint is damaged or half-written."""


class NoForeignTag(ForeignFault, NoCheckpoint, ValueError):
    """No tag was given, and there is no `latest` that names one."""


class RefusedPickle(ForeignFault, ValueError):
    """A file holds an object whose class is not known to be harmless; nothing of it was executed."""
