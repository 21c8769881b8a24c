"""Named axes over ranks: the arithmetic of a topology, and a group of ranks per set of axes, with channels.

A `Topology` communicates nothing, and nothing in it grows with the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, overload

from mpispeed.base import device as devices
from mpispeed.base.errors import TopologyError
from mpispeed.mesh.collectives.group import CommTrace

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.progress import Progress
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.world import World

Key = tuple[str, ...]

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

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Position of a rank, by arithmetic."""
        rest, position = value - self._base, 0
        for size, stride in zip(self._sizes, self._strides, strict=True):
            at, rest = divmod(rest, stride)
            if not 0 <= at < size:
                break
            position = position * size + at
        else:
            if not rest and position in range(*slice(start, stop).indices(len(self))):
                return position
        msg = f"rank {value} is not among {self}"
        raise ValueError(msg)

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

    def block_size(self, axes: Axes) -> int:
        """The least B so that each group over `axes` lies in one of the blocks of B neighbours from rank 0 on.

        Where nodes have equally many neighbouring ranks and there are several, all groups lie inside of nodes exactly
        if B divides the ranks of a node.
        """
        chosen = self.resolve(axes)
        rows = zip(self.names, self.sizes, self._strides(), strict=True)
        return max((size * stride for name, size, stride in rows if name in chosen and size > 1), default=1)

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
                f"axis {axis!r} (size {size}) must nest, so each size has to divide the next larger one; {size} is "
                f"divided by {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
            )
            raise TopologyError(msg)
        if factor.size > inner.size:
            chain.append(factor.size // inner.size)
        inner = factor
    return chain[::-1]


class Mesh:
    """Named axes over all ranks.

    `mesh["data"]` and `mesh["data", "model"]` are groups over these axes; axes of size 1 and `mesh[()]`
    give a group of this rank alone. The order in which axes are named does not matter.

    Attributes:
        prepare: called with each channel that is made, on all ranks; such as to open the ways of its groups.
    """

    def __init__(
        self,
        topology: Topology,
        world: World,
        *,
        reduction: str | None = None,
        channel: tuple[Mesh, Progress] | None = None,
    ) -> None:
        """Make a group for every set of axes larger than 1, and a duplicate of each for started verbs.

        Args:
            topology: the axes.
            world: the ranks.
            reduction: "ordered" or "mpi"; that of the world by default.
            channel: the mesh whose groups are duplicated for this channel of it.

        Collective over: all ranks.

        Raises:
            TopologyError: the axes do not multiply to the number of ranks.
        """
        if topology.size != world.size:
            msg = (
                f"the axes {topology} make {topology.size} ranks, but the job has {world.size}; start "
                f"{topology.size} ranks or change the axis sizes"
            )
            raise TopologyError(msg)
        self.topology, self.world, self.rank, self.size = topology, world, world.rank, world.size
        self.reduction = reduction or world.comm.reduction
        self.comm_trace: CommTrace = CommTrace(world.comm_trace) if channel is None else channel[0].comm_trace
        self._coords = topology.coords(world.rank)
        self._channels: dict[str, Mesh] = {}
        self._found: dict[str | Key, Comm] = {}
        self._indices: dict[str | Key, int] = {}
        self._solos: dict[Key, Comm] = {}
        self._progress: Progress | None = None
        self.prepare: Callable[[Mesh], object] | None = None
        self._comms: dict[Key, Comm]
        if channel is not None:
            parent, self._progress = channel
            self._comms = {axes: comm.duplicate(self._progress) for axes, comm in parent._comms.items()}
            return
        self._check_grid()
        names = [n for n, size in zip(topology.names, topology.sizes, strict=True) if size > 1]
        subsets = [axes for count in range(1, len(names) + 1) for axes in combinations(names, count)]
        plain = {axes: self._make(axes) for axes in subsets}
        progress = world.new_channel("mesh") if subsets else None
        self._comms = {axes: comm if progress is None else comm.starting_on(progress) for axes, comm in plain.items()}

    @property
    def node(self) -> Comm:
        """The ranks that share this rank's node."""
        return self.world.node

    def __getitem__(self, axes: Axes) -> Comm:
        """The group over `axes` that this rank belongs to. Not collective: groups were made before."""
        named = axes if isinstance(axes, str) else tuple(axes)
        found = self._found.get(named)
        if found is None:
            found = self._found[named] = self._find(named)
        return found

    def _find(self, axes: str | Key) -> Comm:
        chosen = self.topology.resolve(axes)
        key = tuple(name for name in chosen if self.topology.group_size(name) > 1)
        if key:
            return self._comms[key]
        if chosen not in self._solos:
            # Copies between host and device run beside what is computed.
            progress = self._progress if devices.used() is not None else None
            named = self._spoken(chosen)
            self._solos[chosen] = self.world.alone(named, self.reduction, self.comm_trace, progress)
        return self._solos[chosen]

    def groups(self) -> list[tuple[Key, Comm]]:
        """All groups of several ranks with their fine axes, in the same order on all ranks."""
        return list(self._comms.items())

    def index(self, axes: Axes) -> int:
        """Position of this rank in its group over `axes`."""
        named = axes if isinstance(axes, str) else tuple(axes)
        found = self._indices.get(named)
        if found is None:
            found = self._indices[named] = self.topology.index(self.rank, named)
        return found

    def channel(self, name: str) -> Mesh:
        """The same axes on duplicated groups with a progress thread of their own.

        All verbs of a channel, started or blocking, run in the order of their calls, and independently of
        other channels.

        Collective over: all ranks, the first time a name is used.
        """
        if self._progress is not None:
            msg = "a channel has no channels of its own; ask the mesh it was made of"
            raise TopologyError(msg)
        if name not in self._channels:
            channel = self, self.world.new_channel(name)
            made = self._channels[name] = Mesh(self.topology, self.world, reduction=self.reduction, channel=channel)
            if self.prepare is not None:
                self.prepare(made)
        return self._channels[name]

    def close(self) -> None:
        """Finish what was started and give all groups back. Collective over: all ranks."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        if self._progress is not None:
            self.world.close_channel(self._progress)
        for comm in self._comms.values():
            if comm.progress is not None:
                self.world.close_channel(comm.progress)
            comm.close()
        self._comms.clear()
        self._found.clear()

    def _make(self, axes: Key) -> Comm:
        fixed = {name: at for name, at in self._coords.items() if name not in axes}
        color = self.topology.rank(**fixed, **dict.fromkeys(axes, 0))
        peers, named = self.topology.peers(self.rank, axes), self._spoken(axes)
        return self.world.comm.split(color, peers, named, reduction=self.reduction, comm_trace=self.comm_trace)

    def _spoken(self, axes: Key) -> Key:
        """The alias that means exactly these axes, if there is one, so that the trace shows names that users know.

        An axis that is not divided keeps its name.
        """
        if len(axes) == 1 and "." not in axes[0]:
            return axes
        for alias, parts in self.topology.aliases:
            if axes and tuple(p for p in parts if self.topology.group_size(p) > 1) == axes:
                return (alias,)
        return axes

    def _check_grid(self) -> None:
        coords = self.world.grid_coords(self.topology.sizes) if self.topology.sizes else None
        own = tuple(self._coords.values())
        if coords is not None and coords != own:
            msg = f"rank {self.rank} is at {own} by arithmetic and at {coords} on the MPI grid of {self.topology}"
            raise TopologyError(msg)
