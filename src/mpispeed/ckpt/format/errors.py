"""Exceptions of checkpoints."""

from __future__ import annotations

from mpispeed.base.errors import CheckpointError, MpispeedError

PLAIN = (MpispeedError, OSError)
"""Errors whose class is not shown when they are told to all ranks."""


class NoCheckpoint(CheckpointError):
    """No tag was asked for and the folder has no `latest`: there is nothing to resume from."""


class TagNotFound(CheckpointError, FileNotFoundError):
    """The tag that was asked for, or that `latest` names, does not exist."""


class IncompleteCheckpoint(CheckpointError):
    """A tag folder without a complete manifest: a save that never committed."""


class CorruptCheckpoint(CheckpointError):
    """Bytes on disk differ from those that were saved."""


class SaveFailed(CheckpointError):
    """A save cannot finish; raised on every rank. Earlier checkpoints are untouched."""

    is_collective = True


class UnsupportedValue(SaveFailed, TypeError):
    """The state holds an object that the format does not support; nothing has been written."""


class ReservedKey(SaveFailed, ValueError):
    """`client_state` has a key that belongs to the checkpoint; nothing has been written."""


class TagMismatch(SaveFailed, AssertionError):
    """Ranks asked for different tags and the tag check is set to fail."""
