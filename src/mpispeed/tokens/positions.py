"""Elements of a file by position, as numpy arrays; for tools. Samples are read by `native.token_reads`."""

from __future__ import annotations

import os

import numpy as np

from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.layout import Place

_MOST_BYTES = 1 << 30  # of one system call


def read_bytes(handle: int, offset: int, nbytes: int) -> bytearray:
    """So many bytes of a file.

    Raises:
        TokenStoreError: the file ends before.
        OSError: it cannot be read.
    """
    found = bytearray(nbytes)
    view, done = memoryview(found), 0
    while done < nbytes:
        part = os.preadv(handle, [view[done : done + _MOST_BYTES]], offset + done)
        if not part:
            msg = (
                f"the file ends at byte {offset + done}, within bytes {offset} to {offset + nbytes} that are asked for"
            )
            raise TokenStoreError(msg)
        done += part
    return found


def read_elements(handle: int, place: Place, first: int, count: int) -> np.ndarray:
    """Elements of a table.

    Raises:
        TokenStoreError: there are not so many.
        OSError: the file cannot be read.
    """
    if first < 0 or count < 0 or first + count > place.count:
        msg = f"elements {first} to {first + count} are asked for of a table with {place.count}"
        raise TokenStoreError(msg)
    raw = read_bytes(handle, place.offset + first * place.itemsize, count * place.itemsize)
    return np.frombuffer(raw, place.numpy)
