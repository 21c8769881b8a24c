"""Table of units and of the place of each parameter in them; replaces attributes hung on tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from mpispeed.base.errors import StoreError
from mpispeed.store.layout import Entry, FlatLayout


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that are unsharded, reduced and updated together: one flat buffer per kind of state.

    `dtype` is that of the parameters of the model as given; it may differ from the compute dtype. `kind` is a label of
    the planner of units.
    """

    index: int
    name: str
    layout: FlatLayout
    params: tuple[nn.Parameter, ...]  # in the order of layout.entries
    dtype: torch.dtype
    is_trainable: bool = True
    kind: Hashable = None


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
