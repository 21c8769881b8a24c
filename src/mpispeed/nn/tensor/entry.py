"""Entry of an activation into a sliced region; made once, also where several layers take it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import regions


@dataclass(slots=True)
class SequenceCut:
    """The dim of activations that sequence parallelism slices between layers, and if it does so now.

    Attributes:
        dim: of the sequence.
        is_on: False while sequences are full, in evaluation for example.
    """

    dim: int = 1
    is_on: bool = True

    def dim_of(self, x: torch.Tensor) -> int:
        """The dim of the sequence in `x`; where batch and sequence have become one, that one."""
        return 0 if x.dim() == 2 else self.dim


class Entry:
    """The border before column-parallel layers.

    Query, key and value take the same tensor: the first crosses the border, the others share its result, so that
    gradients are summed, or a sequence gathered, once.

    Args:
        comm: the slicing group.
        sequence: given where the sequence of the input is sliced.
        users: layers that share it.
    """

    def __init__(self, comm: Comm, sequence: SequenceCut | None = None, users: int = 1) -> None:
        self.comm, self.sequence, self.users = comm, sequence, users
        self.is_crossed = False
        self._kept: _Kept | None = None

    @classmethod
    def crossed(cls, comm: Comm) -> Entry:
        """An entry for layers of a module whose input has crossed the border already."""
        made = cls(comm)
        made.is_crossed = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        sequence = self.sequence
        if sequence is not None:
            sequence = memo.setdefault(id(sequence), SequenceCut(sequence.dim, sequence.is_on))
        made = memo[id(self)] = Entry(self.comm, sequence, self.users)
        made.is_crossed = self.is_crossed
        return made

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The input as the sliced region sees it.

        Collective over: `comm`, in backward; where the sequence is sliced in forward too.
        """
        has_grad = torch.is_grad_enabled() and x.requires_grad
        is_cut = self.sequence is not None and self.sequence.is_on
        if self.comm.size == 1 or self.is_crossed or not (is_cut or has_grad):
            return x
        key = None if x.is_inference() or self.users == 1 else (x._version, torch.is_grad_enabled(), is_cut)
        kept = self._kept
        if kept is not None and kept.source() is x and kept.key == key:
            kept.left -= 1
            if not kept.left:
                self._kept = None
            return kept.out
        if is_cut and self.sequence is not None:
            out = regions.gather_sequence(x, self.comm, self.sequence.dim_of(x))
        else:
            out = regions.copy_to(x, self.comm)
        self._kept = None if key is None else _Kept(weakref.ref(x, self._forget), key, out, self.users - 1)
        return out

    def _forget(self, source: weakref.ref[torch.Tensor]) -> None:
        """Drop the cached result, because the input has died."""
        if self._kept is not None and self._kept.source is source:
            self._kept = None


@dataclass(slots=True)
class _Kept:
    source: weakref.ref[torch.Tensor]
    key: tuple[int, bool, bool]
    out: torch.Tensor
    left: int
