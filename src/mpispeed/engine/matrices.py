"""Matrices that ranks have parts of: who has what, who owns them, and where their elements are in messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.ckpt.slices import TensorSlice, place_slice, take_slice
from mpispeed.engine.cut_info import info_of_cut
from mpispeed.nn.tensor import cuts
from mpispeed.optim.muon import matrices_of
from mpispeed.plan.matrix_owners import Ownership, deal, rounds_of, work_of
from mpispeed.store.layout import Span
from mpispeed.store.tiers import MASTER

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh, Topology
    from mpispeed.sharding.params import ParamStore
    from mpispeed.store.layout import Entry, Unit

CONVOLUTIONS = nn.modules.conv._ConvNd


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of a group: its shard, and its slice of layers.

    Attributes:
        rank: in the world.
        shard: its position among the ranks that have shards, or copies, of one slice.
        model: its position on the model axis; 0 where slices do not matter.
    """

    rank: int
    shard: int
    model: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a matrix in a unit of one slice: from `first` on, `numel` of a buffer of `padded`."""

    first: int
    numel: int
    padded: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or a stack of them that has one owner.

    Attributes:
        name: of the parameter, with the number of the matrix in it.
        group: index of the parameter group.
        shape: (matrices, rows, columns).
        places: in the units of each slice; one where slices do not matter.
        cuts: the slices that ranks of the model axis have of it; empty where it is whole on all of them.
    """

    name: str
    group: int
    shape: tuple[int, int, int]
    places: tuple[Place, ...]
    cuts: tuple[TensorSlice, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        count, rows, columns = self.shape
        return count * rows * columns

    @property
    def work(self) -> float:
        """Work of its owner."""
        count, rows, columns = self.shape
        return work_of(rows, columns, count)

    def put(self, whole: torch.Tensor, member: Member, values: torch.Tensor, start: int) -> None:
        """Copy a member's elements, from `start` of its slice on, into the flat whole."""
        if self.cuts:
            place_slice(self.cuts[member.model], values, whole, start)
        else:
            whole[start : start + values.numel()].copy_(values)

    def take(self, whole: torch.Tensor, member: Member, values: torch.Tensor, start: int) -> None:
        """Fill `values` with a member's elements of the flat whole, from `start` of its slice on."""
        if self.cuts:
            take_slice(self.cuts[member.model], whole, values, start)
        else:
            values.copy_(whole[start : start + values.numel()])


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices that travel together.

    Attributes:
        units: this rank's units that have them.
        matrices: indices in the exchange, in the order of units.
    """

    units: tuple[Unit, ...]
    matrices: tuple[int, ...]


@dataclass(eq=False)
class Group:
    """Matrices of which the same ranks have parts, in the same kind of memory.

    Attributes:
        comm: the ranks.
        members: the same, with their parts.
        me: this rank's index.
        axes: over which masters are cut; empty: each rank has all of its slice.
        matrices: in the order of units.
        by_unit: by the index of a unit of this rank, its matrices with their ranges in it.
        dtype: of messages.
        device: of messages, where masters are.
    """

    comm: Comm
    members: tuple[Member, ...]
    me: int
    axes: tuple[str, ...]
    matrices: tuple[Matrix, ...]
    by_unit: Mapping[int, list[tuple[int, Span]]]
    dtype: torch.dtype
    device: torch.device
    topology: Topology
    ownership: Ownership = field(init=False)
    rounds: list[Round] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.ownership = deal([matrix.work for matrix in self.matrices], len(self.members))

    def set_rounds(self, units: Sequence[Unit], *, is_alike: bool) -> None:
        """Divide the matrices into rounds; into one if slices have them in other units. `units`: those of this rank."""
        rows = [[(self.owner(at), self.matrices[at].numel) for at, _ in self.by_unit[unit.index]] for unit in units]
        chosen = rounds_of(rows) if is_alike else [list(range(len(units)))]
        for positions in chosen:
            own = tuple(units[position] for position in positions)
            indices = [at for unit in own for at, _ in self.by_unit[unit.index]]
            self.rounds.append(Round(own, tuple(indices if is_alike else sorted(indices))))

    @property
    def gathers(self) -> bool:
        """True if owners lack parts of their matrices."""
        return len(self.members) > 1 and (bool(self.axes) or any(matrix.cuts for matrix in self.matrices))

    def owner(self, index: int) -> int:
        """The member that owns a matrix."""
        return self.ownership.owners[index]

    def part(self, matrix: Matrix, member: Member) -> Span:
        """The range of its slice of a matrix whose master a member has."""
        place, axes = matrix.places[member.model if matrix.cuts else 0], self.axes
        start, size = 0, place.padded
        for axis in axes:  # as `store.transfers.own_span`
            size //= self.topology.group_size(axis)
            start += self.topology.index(member.rank, axis) * size
        own = Span(place.first, place.first + place.numel)
        return own.intersect(Span(start, start + size)).shifted(-place.first)

    def sent(self, matrix: Matrix, member: int, owner: int) -> Span:
        """The range of its slice that a member sends to the owner of a matrix.

        Where masters are whole, the owner takes what it needs from its own copy, and from those of its slices.
        """
        one, other = self.members[member], self.members[owner]
        if self.axes or (matrix.cuts and one.shard == other.shard) or member == owner:
            return self.part(matrix, one)
        return Span(0, 0)

    def owned(self, indices: Sequence[int], owner: int) -> list[int]:
        """Those of the matrices that a member owns."""
        return [at for at in indices if self.owner(at) == owner]

    def outgoing(self, indices: Sequence[int]) -> Iterator[tuple[int, int, Span]]:
        """(owner, matrix, range of this rank's slice) of what this rank sends for some matrices, in that order."""
        for owner in range(len(self.members)):
            for at in self.owned(indices, owner):
                span = self.sent(self.matrices[at], self.me, owner)
                if span.numel:
                    yield owner, at, span

    def incoming(self, indices: Sequence[int]) -> Iterator[tuple[int, int, Span]]:
        """(member, matrix, range of its slice) of what this rank, as the owner, gets, in that order."""
        own = self.owned(indices, self.me)
        for member in range(len(self.members)):
            for at in own:
                span = self.sent(self.matrices[at], member, self.me)
                if span.numel:
                    yield member, at, span


def counts_of(rows: Sequence[tuple[int, int, Span]], size: int) -> list[int]:
    """Elements by rank of rows of `Group.outgoing` or `Group.incoming`."""
    counts = [0] * size
    for rank, _, span in rows:
        counts[rank] += span.numel
    return counts


def find_groups(
    mesh: Mesh, model: nn.Module, params: ParamStore, units: Sequence[Unit], dtypes: Mapping[int, torch.dtype]
) -> list[Group]:
    """The groups of the matrices in these units of this rank, in the same order on all ranks of a pipeline's stage.

    Args:
        mesh: the ranks.
        model: with its layers sliced.
        params: its parameters.
        units: those whose parameters are matrices.
        dtypes: of messages, by index of the unit.

    Collective over: the model axis.

    Raises:
        ConfigError: on every rank of the model axis, if slices have different matrices.
    """
    slices = mesh["model"]
    sliced = slices_of(model, slices.size)
    places = {
        entry.name: (unit.index, Place(entry.offset, entry.numel, unit.layout.padded))
        for unit in units
        for entry in unit.layout.entries
        if entry.name in sliced
    }
    everyone = slices.gather_objects(places) if slices.size > 1 else [places]
    _require_alike(everyone)
    titles = [[(name, number) for name, (number, _) in rows.items()] for rows in everyone]
    convolutions = {
        id(param)
        for module in model.modules()
        if isinstance(module, CONVOLUTIONS)
        for param in module.parameters(False)
    }
    sorts: dict[_Sort, list[Unit]] = {}
    for unit in units:
        master, entries = unit.states.master, unit.layout.entries
        sort = _Sort(
            master.axes or unit.states.partial,
            not master.is_replicated,
            bool(entries) and entries[0].name in sliced,
            params.tiers.home(MASTER, unit.index),
            dtypes[unit.index],
        )
        sorts.setdefault(sort, []).append(unit)
    found = []
    for sort in sorted(sorts, key=str):
        group = _group(mesh, sorts[sort], sort, sliced if sort.is_sliced else {}, everyone, convolutions)
        group.set_rounds(sorts[sort], is_alike=not sort.is_sliced or all(rows == titles[0] for rows in titles))
        found.append(group)
    return found


@dataclass(frozen=True, slots=True)
class _Sort:
    """Common traits of the units of a group: ranks, kind of masters and memory, and dtype of messages."""

    axes: tuple[str, ...]
    is_cut: bool
    is_sliced: bool
    device: torch.device
    dtype: torch.dtype


def _group(
    mesh: Mesh,
    units: Sequence[Unit],
    sort: _Sort,
    sliced: Mapping[str, tuple[TensorSlice, ...]],
    everyone: Sequence[Mapping[str, tuple[int, Place]]],
    convolutions: set[int],
) -> Group:
    """The group of units whose masters are cut over some axes, or else are whole on the ranks of these."""
    axes = sort.axes
    topology = mesh.topology
    over = (*axes, "model") if sliced else axes
    members = tuple(
        Member(rank, topology.index(rank, axes), topology.index(rank, "model") if sliced else 0)
        for rank in topology.peers(mesh.rank, over)
    )
    matrices: list[tuple[Matrix, int, Span]] = []
    for unit in units:
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            if entry.name in sliced:
                places = tuple(rows[entry.name][1] for rows in everyone)
                cut = sliced[entry.name]
                shape = matrices_of(cut[0].info.shape, is_convolution=id(param) in convolutions)
                matrices.append((Matrix(entry.name, entry.group, shape, places, cut), unit.index, entry.span))
            else:
                matrices += ((one, unit.index, span) for one, span in _whole(unit, entry, id(param) in convolutions))
    if sliced and any(list(rows) != list(everyone[0]) for rows in everyone):
        matrices.sort(key=lambda row: row[0].name)
    by_unit: dict[int, list[tuple[int, Span]]] = {unit.index: [] for unit in units}
    for index, (_, unit_index, span) in enumerate(matrices):
        by_unit[unit_index].append((index, span))
    return Group(
        mesh[over],
        members,
        next(at for at, member in enumerate(members) if member.rank == mesh.rank),
        axes if sort.is_cut else (),
        tuple(matrix for matrix, _, _ in matrices),
        by_unit,
        sort.dtype,
        sort.device,
        topology,
    )


def _whole(unit: Unit, entry: Entry, is_convolution: bool) -> Iterator[tuple[Matrix, Span]]:
    """The matrices of a parameter that no slice has a part of: each of a stack by itself."""
    count, rows, columns = matrices_of(entry.shape, is_convolution=is_convolution)
    for number in range(count):
        first, numel = entry.offset + number * rows * columns, rows * columns
        place = Place(first, numel, unit.layout.padded)
        title = entry.name if count == 1 else f"{entry.name}[{number}]"
        yield Matrix(title, entry.group, (1, rows, columns), (place,)), Span(first, first + numel)


def slices_of(model: nn.Module, size: int) -> dict[str, tuple[TensorSlice, ...]]:
    """By name, the slices of all ranks of the model axis of each sliced parameter."""
    if size == 1:
        return {}
    named, found = dict(model.named_parameters()), {}
    for name, cut in cuts(model).items():
        if name in named and cut.kind != "replicated":
            info = info_of_cut(name, cut.shape, named[name].dtype, cut)
            found[name] = tuple(TensorSlice(info, rank, size) for rank in range(size))
    return found


def _require_alike(everyone: Sequence[Mapping[str, object]]) -> None:
    odd = next((rows for rows in everyone if rows.keys() != everyone[0].keys()), None)
    if odd is not None:
        name = min(odd.keys() ^ everyone[0].keys())
        msg = (
            f"parameter {name!r} is a matrix for the optimizer Muon on some ranks of the model axis and not on all of "
            "them; give all of them the same parameters, with the same use_muon"
        )
        raise ConfigError(msg)
