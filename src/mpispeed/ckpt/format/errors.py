"""Exceptions of checkpoints, and the context of steps that fail on all ranks if they fail on one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpispeed.base.errors import CheckpointError, MpispeedError

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


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


def together(comm: Comm, doing: str, error: type[MpispeedError] = SaveFailed) -> AbstractContextManager[None]:
    """`comm.together` for saves and loads: errors of files are shown without their class. Collective over: comm."""
    return comm.together(error, doing=doing, plain=(MpispeedError, OSError))
