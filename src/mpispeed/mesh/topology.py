"""Ranks on named axes: pure arithmetic, no communication, nothing that grows with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from mpispeed.base.errors import TopologyError

Axes = str | Iterable[str]
"""One axis or alias name, or several."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A named inner part of an axis: `name` spans the `size` fastest positions of it.

    `setting` is the origin of the size, for messages. `rest` optionally names the remaining outer part of the axis, for
    example `Factor("data.inner", 4, "mics_shard_size", rest="data.outer")`.
    """

    name: str
    size: int
    setting: str
    rest: str | None = None


class Peers(Sequence[int]):
    """World ranks that differ only along some axes, computed when asked for."""

    __slots__ = ("_base", "_sizes", "_strides")

    def __init__(self, base: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._base, self._sizes, self._strides = base, sizes, strides

    def __len__(self) -> int:
        return math.prod(self._sizes)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            msg = f"index {index} is outside a group of {len(self)} ranks"
            raise IndexError(msg)
        rest, rank = index % len(self), self._base
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            rest, position = divmod(rest, size)
            rank += position * stride
        return rank

    def __repr__(self) -> str:
        shown = ", ".join(str(rank) for rank in self[:6])
        return f"Peers([{shown}{', ...' if len(self) > 6 else ''}])"


@dataclass(frozen=True, slots=True, init=False)
class Topology:
    """An ordered set of axes with sizes, slowest first; the last axis varies fastest with the rank.

    `aliases` give coarse names to several fine axes, for example `{"data": ("data.outer", "data.inner")}`.
    Wherever axes are asked for, an alias stands for its fine axes, and the order in which they are
    named does not matter: groups are always ordered by world rank.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    aliases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    size: int = field(default=1)

    def __init__(self, axes: Mapping[str, int], aliases: Mapping[str, Axes] | None = None) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                msg = f"axis {name!r} has size {size!r}; every axis needs a size of at least 1"
                raise TopologyError(msg)
        table = tuple(
            (name, (parts,) if isinstance(parts, str) else tuple(parts)) for name, parts in (aliases or {}).items()
        )
        for name, parts in table:
            unknown = [part for part in parts if part not in axes]
            if name in axes or unknown or len(set(parts)) != len(parts):
                msg = (
                    f"alias {name!r} = {parts} does not fit the axes {tuple(axes)}: an alias needs a name of its own "
                    "and names each of its fine axes once"
                )
                raise TopologyError(msg)
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", tuple(axes.values()))
        object.__setattr__(self, "aliases", table)
        object.__setattr__(self, "size", math.prod(axes.values()))

    @classmethod
    def factored(cls, axes: Mapping[str, int], factors: Mapping[str, Sequence[Factor]]) -> Topology:
        """Split axes into fine axes so that every factor is a group of its own; old names become aliases.

        Raises:
            TopologyError: sizes that do not form a divisor chain, naming both settings.
        """
        fine: dict[str, int] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        for axis, size in axes.items():
            wanted = factors.get(axis, ())
            if not wanted:
                fine[axis] = size
                continue
            chain = _divisor_chain(axis, size, wanted)
            parts = [f"{axis}.{i}" for i in range(len(chain))]
            inner_sizes = [math.prod(chain[i:]) for i in range(len(chain) + 1)]
            fine.update(zip(parts, chain, strict=True))
            aliases[axis] = tuple(parts)
            for factor in wanted:
                first = len(chain) - inner_sizes[::-1].index(factor.size)
                aliases[factor.name] = tuple(parts[first:])
                if factor.rest:
                    aliases[factor.rest] = tuple(parts[:first])
        return cls(fine, aliases)

    # -- names -----------------------------------------------------------------------------------------------

    def resolve(self, axes: Axes) -> tuple[str, ...]:
        """Fine axes meant by `axes`, in the order of the topology.

        Raises:
            TopologyError: a name is neither an axis nor an alias.
        """
        wanted: set[str] = set()
        table = dict(self.aliases)
        for name in (axes,) if isinstance(axes, str) else axes:
            if name in table:
                wanted.update(table[name])
            elif name in self.names:
                wanted.add(name)
            else:
                known = ", ".join([*self.names, *table])
                msg = f"unknown axis {name!r}; this topology has: {known}"
                raise TopologyError(msg)
        return tuple(name for name in self.names if name in wanted)

    def has(self, name: str) -> bool:
        """True if `name` is an axis or an alias."""
        return name in self.names or any(name == alias for alias, _ in self.aliases)

    def group_size(self, axes: Axes) -> int:
        """Number of ranks in a group over `axes`; 1 for no axes."""
        chosen = self.resolve(axes)
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in chosen)

    # -- ranks -----------------------------------------------------------------------------------------------

    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            msg = f"rank {rank} is outside a topology of {self.size} ranks ({self})"
            raise TopologyError(msg)

    def coords(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every fine axis."""
        self._check_rank(rank)
        strides = self._strides()
        return {name: rank // st % size for name, size, st in zip(self.names, self.sizes, strides, strict=True)}

    def rank(self, **coords: int) -> int:
        """World rank at the given position on every fine axis.

        Fine axes whose names are not identifiers are passed as `rank(**{"data.0": 1})`.
        """
        if set(coords) != set(self.names):
            msg = f"a rank needs one coordinate for each of {self.names}, got {tuple(coords)}"
            raise TopologyError(msg)
        for name, size in zip(self.names, self.sizes, strict=True):
            if not 0 <= coords[name] < size:
                msg = f"coordinate {name}={coords[name]} is outside an axis of size {size}"
                raise TopologyError(msg)
        return sum(coords[name] * st for name, st in zip(self.names, self._strides(), strict=True))

    def index(self, rank: int, axes: Axes) -> int:
        """Position of `rank` in its group over `axes`."""
        at, chosen, position = self.coords(rank), self.resolve(axes), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in chosen:
                position = position * size + at[name]
        return position

    def peers(self, rank: int, axes: Axes) -> Sequence[int]:
        """World ranks of the group over `axes` that `rank` belongs to, ascending, computed lazily."""
        at, chosen = self.coords(rank), self.resolve(axes)
        return self._lattice({name: at[name] for name in self.names if name not in chosen})

    def match(self, **coords: int) -> Sequence[int]:
        """World ranks whose coordinates equal all given ones, ascending, computed lazily."""
        for name, at in coords.items():
            if name not in self.names:
                msg = f"unknown fine axis {name!r}; this topology has: {', '.join(self.names)}"
                raise TopologyError(msg)
            if not 0 <= at < self.sizes[self.names.index(name)]:
                return ()
        return self._lattice(coords)

    def groups(self, axes: Axes) -> Iterator[Sequence[int]]:
        """All groups over `axes`, in row-major order over the remaining axes."""
        chosen = self.resolve(axes)
        rest = [name for name in self.names if name not in chosen]
        for first in self._lattice(dict.fromkeys(chosen, 0)) if rest else (0,):
            yield self.peers(first, chosen)

    def _lattice(self, fixed: Mapping[str, int]) -> Sequence[int]:
        """Ranks with the fixed coordinates; neighbouring free axes are merged so that most groups are a range."""
        base, sizes, strides = 0, list[int](), list[int]()
        for name, size, stride in zip(self.names, self.sizes, self._strides(), strict=True):
            if name in fixed:
                base += fixed[name] * stride
            elif size > 1:
                if strides and strides[-1] == stride * size:
                    sizes[-1] *= size
                    strides[-1] = stride
                else:
                    sizes.append(size)
                    strides.append(stride)
        if not sizes:
            return range(base, base + 1)
        if len(sizes) == 1:
            return range(base, base + sizes[0] * strides[0], strides[0])
        return Peers(base, tuple(sizes), tuple(strides))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True)) or "one rank"


def _divisor_chain(axis: str, size: int, factors: Sequence[Factor]) -> list[int]:
    """Sizes of the fine axes, slowest first, so that every factor is a product of the last few."""
    chain: list[int] = []
    inner = Factor(axis, 1, "1")
    for factor in [*sorted(factors, key=lambda f: f.size), Factor(axis, size, f"size of axis {axis!r}")]:
        if factor.size < 1 or factor.size % inner.size:
            msg = (
                f"{factor.setting} = {factor.size} is not a multiple of {inner.setting} = {inner.size}; groups inside "
                f"axis {axis!r} (size {size}) must nest, so each size has to divide the next larger one"
            )
            raise TopologyError(msg)
        if factor.size > inner.size:
            chain.append(factor.size // inner.size)
        inner = factor
    return chain[::-1]
