"""Experts that are on other data ranks, by name: what a checkpoint of the whole layer holds, seen from one rank.

Experts that are modules have their numbers in the names of their parameters; those of other ranks have the shapes of
the ones here. Fused experts are slices of tensors of all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from mpispeed.base.even_split import share
from mpispeed.ckpt.format.logical import ALL_EXPERTS
from mpispeed.nn.expert import ExpertModules, FusedExperts, RoutedExperts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Numbered:
    """Experts of one layer that are modules; names of their parameters are prefix, number, rest.

    Attributes:
        held: numbers of those of this rank.
        total: experts of the layer.
        ranks: that share them out.
    """

    prefix: str
    held: range
    total: int
    ranks: int = 1

    def alike(self, number: int) -> int:
        """The expert of this rank at the place that one of another rank has there, or the last one before it."""
        ranges = (share(self.total, rank, self.ranks) for rank in range(self.ranks))
        place = next(number - start for start, stop in ranges if start <= number < stop)
        return self.held[min(place, len(self.held) - 1)]

    def number(self, name: str) -> int | None:
        """The number in the name of a parameter; None: it is of no expert of this layer."""
        if not name.startswith(self.prefix):
            return None
        return int(name[len(self.prefix) :].partition(".")[0])

    def renumbered(self, name: str, number: int) -> str:
        """The name of the same parameter of another expert."""
        return f"{self.prefix}{number}.{name[len(self.prefix) :].partition('.')[2]}"


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter that is a slice, along its first dim, of a tensor of all experts of `each` so many elements."""

    held: range
    total: int
    each: int

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (self.total, *own[1:])


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Layers of experts of a model.

    Attributes:
        numbered: layers of modules, those with all experts on every rank too.
        fused: slices by name of the parameter.
        totals: number of experts by name of the parameter, of all fused ones, cut or not.
        are_shared_out: other ranks have experts that this one has not.
    """

    numbered: tuple[Numbered, ...] = ()
    fused: dict[str, Fused] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    are_shared_out: bool = False

    @classmethod
    def of(cls, layers: Mapping[str, RoutedExperts]) -> ExpertNames:
        """Read them off the layers of a model, by their names in it."""
        numbered, fused, totals = [], {}, {}
        for path, layer in layers.items():
            experts, start = layer.experts, f"{path}.{layer.experts_name}." if path else f"{layer.experts_name}."
            if isinstance(experts, ExpertModules):
                numbered.append(Numbered(f"{start}{experts.prefix}", experts.held, experts.num_experts, layer.ep_size))
            elif isinstance(experts, FusedExperts):
                for name, param in experts.named_parameters():
                    totals[start + name] = experts.num_experts
                    if len(experts.held) < experts.num_experts:
                        fused[start + name] = Fused(experts.held, experts.num_experts, math.prod(param.shape[1:]))
        return cls(tuple(numbered), fused, totals, bool(fused) or any(len(row.held) < row.total for row in numbered))

    def differ(self, name: str) -> bool:
        """True if ranks have other values of a parameter because it is of experts that are shared out."""
        if name in self.fused:
            return True
        return any(len(row.held) < row.total and row.number(name) is not None for row in self.numbered)

    def expert(self, name: str) -> tuple[int, int] | None:
        """(number, experts of the layer), for parameters of one expert; (ALL_EXPERTS, experts) for fused ones."""
        if name in self.totals:
            return ALL_EXPERTS, self.totals[name]
        for row in self.numbered:
            number = row.number(name)
            if number is not None:
                return number, row.total
        return None

    def expanded(self, items: Iterable[tuple[str, T]], like: Callable[[str, T], T]) -> Iterator[tuple[str, T]]:
        """Named items of this rank and, in the order of the whole layer, those of experts on other ranks.

        Args:
            items: in the order of the model's parameters.
            like: makes an item of another expert out of one here.
        """
        seen: set[str] = set()
        rows = list(items)
        for name, item in rows:
            row = next((row for row in self.numbered if row.number(name) is not None), None)
            if row is None:
                yield name, item
            elif row.prefix not in seen:
                seen.add(row.prefix)
                yield from self._layer(row, rows, like)

    def _layer(self, row: Numbered, items: list[tuple[str, T]], like: Callable[[str, T], T]) -> Iterator[tuple[str, T]]:
        own: dict[int, list[tuple[str, T]]] = {number: [] for number in row.held}
        for name, item in items:
            number = row.number(name)
            if number is not None:
                own[number].append((name, item))
        for number in range(row.total):
            if number in own:
                yield from own[number]
            else:
                # The one at the same place of its rank: ranks group and freeze theirs alike, by place.
                for name, item in own[row.alike(number)]:
                    other = row.renumbered(name, number)
                    yield other, like(other, item)


NO_EXPERTS = ExpertNames()
"""Of models without layers of experts."""
