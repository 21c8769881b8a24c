"""Snapshot of the state to save, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, Piece


def has_deferred(tensors: Sequence[LogicalTensor]) -> bool:
    """True if some of this rank's pieces are not in memory; those cannot be copied."""
    return any(isinstance(piece.values, Deferred) for tensor in tensors for piece in tensor.pieces)


class Snapshot:
    """Memory for the pieces of one save, kept from save to save.

    The first `take` maps the memory; later ones only copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def take(self, tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
        """The same tensors with copies of their pieces, valid until the next `take`."""
        pieces = [piece for tensor in tensors for piece in tensor.pieces]
        needed = sum(_room(piece) for piece in pieces)
        if needed > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(needed, dtype=torch.uint8)
        taken, at = [], 0
        for tensor in tensors:
            copies = []
            for piece in tensor.pieces:
                copies.append(self._copy(piece, at))
                at += _room(piece)
            taken.append(replace(tensor, pieces=tuple(copies)))
        return taken

    def _copy(self, piece: Piece, at: int) -> Piece:
        values = piece.values
        if isinstance(values, Deferred):
            msg = "elements that are not in memory cannot be copied"
            raise TypeError(msg)
        held = self._memory[at : at + values.nbytes].view(values.dtype)
        held.copy_(values.detach())
        return replace(piece, values=held)


def _room(piece: Piece) -> int:
    """Bytes of a piece, rounded up so that every piece begins at a page."""
    size = 0 if isinstance(piece.values, Deferred) else piece.values.nbytes
    return -(-size // schema.ALIGN_BYTES) * schema.ALIGN_BYTES
