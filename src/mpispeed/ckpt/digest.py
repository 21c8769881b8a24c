"""Digest of a checkpoint's logical content, independent of the number of files. No torch."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.read.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer

_DIGEST_BYTES = 32


class LogicalDigest:
    """Blake2b over name, slot, dtype, shape and elements of tensors, passed in the order of `in_order`."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def begin(self, tensor: TensorEntry) -> None:
        """Begin the next tensor; all of its elements follow."""
        identity = [tensor.name, tensor.slot, tensor.dtype, list(tensor.shape)]
        self._hash.update(json.dumps(identity).encode() + b"\n")

    def update(self, data: ReadableBuffer) -> None:
        """Add the next elements."""
        self._hash.update(data)

    def text(self) -> str:
        """The digest so far."""
        return f"blake2b:{self._hash.hexdigest()}"


def in_order(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Tensors in the order in which they enter the digest."""
    return sorted(tensors, key=lambda tensor: (tensor.name, tensor.slot))


def logical_digest(reader: Reader, verify: bool = True) -> str:
    """The digest of all tensors of a checkpoint; reads every element once, in bounded memory.

    Args:
        reader: the checkpoint.
        verify: compare elements with their checksums on the way.

    Raises:
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    made = LogicalDigest()
    for tensor in in_order(reader.tensors()):
        made.begin(tensor)
        for part in reader.chunks(tensor, verify):
            made.update(part.data.cast("B"))
    return made.text()
