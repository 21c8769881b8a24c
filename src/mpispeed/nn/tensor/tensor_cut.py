"""Slicing of parameters over a slicing group, in plain numbers, and its marks in a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.base.even_split import share

#: kinds that are full on every rank
WHOLE_KINDS = ("replicated",)
#: sliced by the code of the model itself
OWN = "own"
#: sliced for predictions, with elements that several ranks have
COPIED = "copied"

_MARKS = "_tensor_marks"

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank the ranges [start, stop) that it has."""


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The slicing of one parameter.

    Attributes:
        kind: "column" or "row" (one part along `dim`), "sub" (several parts along `dim`, each sliced by itself, the
            shares one behind the other: fused query, key and value), "vocab" (equally many rows on all ranks, those
            behind `shape[0]` are padding), "own" (by the model's own code; `sub_sizes` are the lengths on the ranks),
            "copied" (`ranges_of_ranks` along `dim`, which may overlap), or "replicated" (full on all ranks).
        dim: the dim that is sliced, -1 for none.
        shape: of the full parameter, without padding.
        sub_sizes: lengths of the parts along `dim` of kind "sub", of the ranks' pieces of kind "own".
        grains: one for each part (one for "column" and "row"): its share is a multiple of so many elements, but for
            the last; empty for 1 everywhere.
        ranges_of_ranks: of kind "copied": for each rank the ranges [start, stop) that it has, one behind the other.

    Raises:
        ConfigError: these do not fit to each other.
    """

    kind: str
    dim: int
    shape: tuple[int, ...]
    sub_sizes: tuple[int, ...] = ()
    grains: tuple[int, ...] = ()
    ranges_of_ranks: Ranges = ()

    def __post_init__(self) -> None:
        if self.kind in WHOLE_KINDS:
            return
        if sum(size for size, _ in self.parts) != self.shape[self.dim] or min(self.grains, default=1) < 1:
            msg = f"parts of {self.sub_sizes} in grains of {self.grains} do not make up dim {self.dim} of {self.shape}"
            raise ConfigError(msg)
        if self.grains and len(self.grains) != len(self.parts):
            msg = f"{len(self.grains)} grains {self.grains} for {len(self.parts)} parts of {self.shape}"
            raise ConfigError(msg)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(length, grain) of the parts along `dim`."""
        sizes = self.sub_sizes or (self.shape[self.dim],)
        return list(zip(sizes, self.grains or (1,) * len(sizes), strict=False))

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Ranges [start, stop) of each part that rank `rank` of `size` has along `dim`, without padding."""
        if self.kind == "vocab":
            rows, full = vocab_rows(self.shape[0], size), self.shape[0]
            return [(min(rank * rows, full), min((rank + 1) * rows, full))]
        if self.kind == OWN:
            self._require(size, len(self.sub_sizes))
            return [(sum(self.sub_sizes[:rank]), sum(self.sub_sizes[: rank + 1]))]
        if self.kind == COPIED:
            self._require(size, len(self.ranges_of_ranks))
            return list(self.ranges_of_ranks[rank])
        begin, found = 0, []
        for length, grain in self.parts:
            start, stop = share(length, rank, size, grain)
            found.append((begin + start, begin + stop))
            begin += length
        return found

    def _require(self, size: int, ranks: int) -> None:
        if size != ranks:
            pieces = self.sub_sizes or self.ranges_of_ranks
            msg = f"{ranks} ranks have pieces of {pieces}; they cannot be those of {size}"
            raise ConfigError(msg)

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Shape of the slice of rank `rank` of `size`, with padding."""
        if self.kind in WHOLE_KINDS:
            return self.shape
        if self.kind == "vocab":
            return (vocab_rows(self.shape[0], size), *self.shape[1:])
        held = sum(stop - start for start, stop in self.ranges(rank, size))
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The slice of rank `rank` of `size` of the full tensor; new memory, padding is zero."""
        if self.kind in WHOLE_KINDS:
            return whole.detach().clone(memory_format=torch.contiguous_format)
        out = torch.zeros(self.local_shape(rank, size), dtype=whole.dtype, device=whole.device)
        begin = 0
        for start, stop in self.ranges(rank, size):
            out.narrow(self.dim, begin, stop - start).copy_(whole.detach().narrow(self.dim, start, stop - start))
            begin += stop - start
        return out

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the slices of all ranks, in rank order."""
        if self.kind in WHOLE_KINDS:
            return parts[0].detach().clone()
        whole = torch.empty(self.shape, dtype=parts[0].dtype, device=parts[0].device)
        for rank, part in enumerate(parts):
            begin = 0
            for start, stop in self.ranges(rank, len(parts)):
                held = part.detach().narrow(self.dim, begin, stop - start)
                whole.narrow(self.dim, start, stop - start).copy_(held)
                begin += stop - start
        return whole


def vocab_rows(vocab_size: int, size: int) -> int:
    """Rows that each of `size` ranks holds of a vocabulary, with padding."""
    return math.ceil(vocab_size / size)


@dataclass(slots=True)
class Marks:
    """Slicing of a module's own parameters, by their names in it.

    Attributes:
        cuts: those of injected or own layers, sliced or not.
        partial: those whose gradient on a rank is a partial sum over the slicing group.
    """

    cuts: dict[str, TensorCut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)


def marks_of(module: nn.Module) -> Marks:
    """The module's marks, to be changed; kept on the module, so that they survive copies of the model."""
    marks = module.__dict__.get(_MARKS)
    if marks is None:
        marks = module.__dict__[_MARKS] = Marks()
    return marks


def cuts(model: nn.Module) -> dict[str, TensorCut]:
    """The slicing of all parameters of layers of this package, by full name; every name of a shared one.

    Parameters not in it are replicated.
    """
    return {f"{path}{name}": cut for path, marks in _marked(model) for name, cut in marks.cuts.items()}


def forget_own_cuts(model: nn.Module) -> None:
    """Drop the marks of parameters sliced by the model's own code, which an engine has found."""
    for _, marks in _marked(model):
        marks.cuts = {name: cut for name, cut in marks.cuts.items() if cut.kind != OWN}


def partial_gradients(model: nn.Module) -> list[str]:
    """Full names of parameters whose gradients have to be summed over the slicing group before the update.

    They are replicated, but each rank uses them for its part of the sequence or of the heads only.
    """
    return [f"{path}{name}" for path, marks in _marked(model) for name in sorted(marks.partial)]


def _marked(model: nn.Module) -> Iterator[tuple[str, Marks]]:
    for path, module in model.named_modules(remove_duplicate=False):
        marks = module.__dict__.get(_MARKS)
        if marks is not None:
            yield f"{path}." if path else "", marks
