"""Exceptions of token stores."""

from __future__ import annotations

from mpispeed.base.errors import MpispeedError
from mpispeed.base.plain import printable

_MOST_SIGNS = 1000


class TokenStoreError(MpispeedError, ValueError):
    """A file is no token store, is unfinished or damaged, or lacks what is asked for; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _MOST_SIGNS))


class NoTokenStore(TokenStoreError):
    """There is no token store at this place."""


class UnfinishedStore(TokenStoreError):
    """The program that writes this token store has not come to its end."""
