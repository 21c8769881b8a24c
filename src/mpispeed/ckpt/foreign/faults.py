"""Kinds of failure of foreign checkpoints; each is also the plain error that users of DeepSpeed's functions catch."""

from __future__ import annotations

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint


class ForeignMismatch(CheckpointError, ValueError):
    """What a foreign checkpoint says does not fit together, or cannot be converted."""


class ForeignMissing(CheckpointError, FileNotFoundError):
    """A folder or file of a foreign checkpoint is not there."""


class ForeignIncomplete(IncompleteCheckpoint, ValueError):
    """Files of some ranks are missing, or are of another save."""


class ForeignCorrupt(CorruptCheckpoint, ValueError):
    """A file of a foreign checkpoint is damaged or half-written."""


class NoForeignTag(NoCheckpoint, ValueError):
    """No tag was given, and there is no `latest` that names one."""


class RefusedPickle(CheckpointError, ValueError):
    """A file holds an object whose class is not known to be harmless; nothing of it was executed."""
