"""Units: parameters in one flat buffer with equal shards, their layout in it, and the table of all units."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from mpispeed.base.errors import StoreError
from mpispeed.store.unit_states import UnitStates

ENTRY_ALIGNMENT = 16
"""Elements. Tensors start on 64-byte borders in fp32, so that vector code and GEMMs see aligned rows."""

BLOCK = 256
"""Elements. Cuts fall on multiples of it, so that sums over blocks do not depend on the cut."""


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements, 0 if empty."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """The common range; empty ranges have `numel` 0."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shifted(self, offset: int) -> Span:
        """The same range seen from an origin that lies `offset` lower."""
        return Span(self.start + offset, self.stop + offset)

    @property
    def slice(self) -> slice:
        """Index of the range in a one-dimensional tensor."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor in a flat buffer; `group` is the index of its parameter group."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> Span:
        """Its range in the flat buffer."""
        return Span(self.offset, self.offset + self.numel)


class FlatLayout:
    """Named tensors side by side in one flat buffer, padded so that it divides into equal shards.

    Entries are ordered by parameter group, then as given, so that each group is one range.

    Attributes:
        reckoned: elements of the tensors of the rank with most of them, for decisions that all ranks make alike.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, tuple[int, ...], int]], parts: int, largest: Sequence[int] = ()
    ) -> None:
        """Lay the tensors out.

        Args:
            tensors: (name, shape, group).
            parts: number of equal shards.
            largest: elements of the tensors that the rank with most of them has in the same unit; by default all have
                these. The buffer is as long as that rank's.
        """
        if parts < 1:
            msg = f"a flat buffer is cut into at least 1 part, not {parts}"
            raise StoreError(msg)
        offset = 0
        entries = []
        for name, shape, group in sorted(tensors, key=lambda item: item[2]):
            entry = Entry(name, tuple(shape), offset, group)
            entries.append(entry)
            offset = round_up(offset + entry.numel, ENTRY_ALIGNMENT)
        self.entries: tuple[Entry, ...] = tuple(entries)
        self.parts = parts
        self.reckoned = sum(largest) if largest else self.numel
        offset = max(offset, sum(round_up(count, ENTRY_ALIGNMENT) for count in largest))
        self.padded = round_up(max(offset, 1), parts * BLOCK)
        self._by_name = {entry.name: entry for entry in entries}
        self._starts = [entry.offset for entry in entries]
        if len(self._by_name) != len(entries):
            msg = "two tensors of one layout have the same name"
            raise StoreError(msg)

    @property
    def numel(self) -> int:
        """Elements of the tensors themselves, without padding."""
        return sum(entry.numel for entry in self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def cut(self, index: int) -> Span:
        """Range of shard `index`."""
        if not 0 <= index < self.parts:
            msg = f"part {index} of a buffer that is cut into {self.parts}"
            raise StoreError(msg)
        size = self.padded // self.parts
        return Span(index * size, (index + 1) * size)

    @property
    def whole(self) -> Span:
        """The range of the padded buffer."""
        return Span(0, self.padded)

    def overlaps(self, span: Span) -> Iterator[tuple[Entry, Span]]:
        """Entries that overlap `span`, each with the common range in the flat buffer; empty tensors are left out."""
        first = max(0, bisect.bisect_right(self._starts, span.start) - 1)
        for entry in self.entries[first:]:
            if entry.offset >= span.stop:
                return
            common = entry.span.intersect(span)
            if common.numel:
                yield entry, common

    def group_spans(self) -> list[tuple[int, Span]]:
        """Each parameter group with its range, holes between its tensors included."""
        spans: dict[int, Span] = {}
        for entry in self.entries:
            first = spans.get(entry.group, entry.span)
            spans[entry.group] = Span(first.start, entry.span.stop)
        return list(spans.items())

    def holes(self) -> list[Span]:
        """Ranges of the padded buffer that belong to no tensor."""
        found, position = [], 0
        for entry in self.entries:
            if entry.offset > position:
                found.append(Span(position, entry.offset))
            position = entry.span.stop
        if position < self.padded:
            found.append(Span(position, self.padded))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that are unsharded, reduced and updated together: one flat buffer per kind of state.

    `dtype` is that of the parameters of the model as given; it may differ from the compute dtype. `kind` is a label of
    the planner of units. `states` says where its states rest, in which dtypes, and who has copies.
    """

    index: int
    name: str
    layout: FlatLayout
    params: tuple[nn.Parameter, ...]  # in the order of layout.entries
    dtype: torch.dtype
    is_trainable: bool = True
    kind: Hashable = None
    states: UnitStates = field(default_factory=UnitStates)


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's unit and entry."""

    unit: Unit
    entry: Entry


@dataclass(slots=True)
class Table:
    """All units of a model; parameters are looked up by identity or by name.

    `units` hold trained parameters; `frozen` holds parameters that are sharded too but get no gradient. Indices run
    through both.
    """

    units: tuple[Unit, ...]
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied parameters -> canonical name
    frozen: tuple[Unit, ...] = ()
    _by_param: dict[int, Place] = field(default_factory=dict)
    _by_name: dict[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, unit in enumerate(self.all_units):
            if unit.index != index:
                msg = f"unit {unit.name} has index {unit.index} and stands at {index}"
                raise StoreError(msg)
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                if id(param) in self._by_param:
                    msg = f"parameter {entry.name} stands in two units"
                    raise StoreError(msg)
                place = Place(unit, entry)
                self._by_param[id(param)] = place
                self._by_name[entry.name] = place

    def with_states(self, states: Callable[[Unit], UnitStates]) -> Table:
        """The same units with the states that a function says."""
        units, frozen = (tuple(replace(u, states=states(u)) for u in some) for some in (self.units, self.frozen))
        return Table(units, self.aliases, frozen)

    @property
    def shards_params(self) -> bool:
        """True if any unit's parameters are sharded at rest."""
        return not all(unit.states.param.is_replicated for unit in self.all_units)

    @property
    def shards_masters(self) -> bool:
        """True if any unit's masters are sharded."""
        return not all(unit.states.master.is_replicated for unit in self.units)

    @property
    def shards_grads(self) -> bool:
        """True if any unit's accumulated gradients are sharded; then those of all are, be it over one rank."""
        return not all(unit.states.grad.is_replicated for unit in self.units)

    @property
    def all_units(self) -> tuple[Unit, ...]:
        """Trained units, then frozen ones: `all_units[i].index == i`."""
        return self.units + self.frozen

    def find(self, param: torch.Tensor) -> Place | None:
        """The place of the trained parameter `param`; None if it is frozen or foreign."""
        place = self._by_param.get(id(param))
        return place if place is not None and place.unit.is_trainable else None

    def locate(self, param: torch.Tensor) -> Place | None:
        """The place of `param`, trained or frozen; None if no unit holds it."""
        return self._by_param.get(id(param))

    def by_name(self, name: str) -> Place | None:
        """The place of the parameter of that name (or alias)."""
        return self._by_name.get(self.aliases.get(name, name))

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        """All trained parameters in unit order."""
        for unit in self.units:
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                yield param, Place(unit, entry)

    def all_places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        """All parameters in unit order, frozen ones included."""
        for unit in self.all_units:
            for entry, param in zip(unit.layout.entries, unit.params, strict=True):
                yield param, Place(unit, entry)
