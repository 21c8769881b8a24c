"""Kinds of checkpoint failure that callers tell apart."""

from __future__ import annotations

from mpispeed.base.errors import CheckpointError


class NoCheckpoint(CheckpointError):
    """No tag was asked for and the folder has no `latest`: there is nothing to resume from."""


class TagNotFound(CheckpointError, FileNotFoundError):
    """The tag that was asked for, or that `latest` names, does not exist."""


class IncompleteCheckpoint(CheckpointError):
    """A tag folder without a complete manifest: a save that never committed."""


class CorruptCheckpoint(CheckpointError):
    """Bytes on disk are not those that were saved."""


class SaveFailed(CheckpointError):
    """Raised on every rank when a save cannot finish; what was saved before is untouched."""

    is_collective = True


class UnsupportedValue(SaveFailed, TypeError):
    """The state holds an object that has no place in the format; nothing has been written."""


class ReservedKey(SaveFailed, ValueError):
    """`client_state` has a key that belongs to the checkpoint; nothing has been written."""


class TagMismatch(SaveFailed, AssertionError):
    """Ranks asked for different tags and the tag check is set to fail."""
