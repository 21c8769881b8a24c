"""The units that each module needs while it runs: where they are unsharded and resharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from mpispeed.sharding.units import block_names
from mpispeed.store.layout import Table, Unit


@dataclass(frozen=True, slots=True)
class ModuleUnits:
    """A module whose forward needs `units`; `name` is its path in the model."""

    module: nn.Module
    name: str
    units: tuple[Unit, ...]
    is_leaf: bool = False  # its parts may run in an order that differs between ranks


def find_module_units(
    model: nn.Module, table: Table, *, needs: Callable[[Unit], bool], is_whole: Callable[[nn.Module], bool]
) -> list[ModuleUnits]:
    """The modules to hook: the model itself, blocks, and modules with parameters of their own outside of blocks.

    A block that fits into one unit of each kind is hooked as one; so is a module for which `is_whole` is true. Inside
    of larger blocks every module with parameters of its own is hooked.

    Args:
        model: the model.
        table: its units.
        needs: whether a unit has to be fetched at all.
        is_whole: whether a module is to be fetched with everything in it.
    """
    blocks = block_names(model)
    found: dict[int, ModuleUnits] = {}

    def units_of(module: nn.Module, *, recurse: bool) -> tuple[Unit, ...]:
        chosen: dict[int, Unit] = {}
        for param in module.parameters(recurse=recurse):
            place = table.locate(param)
            if place is not None and needs(place.unit):
                chosen[place.unit.index] = place.unit
        return tuple(chosen[index] for index in sorted(chosen))

    def is_one(units: tuple[Unit, ...]) -> bool:
        kinds = [(unit.is_trainable, unit.dtype, unit.kind) for unit in units]
        return len(set(kinds)) == len(kinds)

    def visit(module: nn.Module, name: str) -> None:
        if id(module) in found:
            return
        everything = units_of(module, recurse=True)
        if is_whole(module) or (name in blocks and _is_called(module) and is_one(everything)):
            found[id(module)] = ModuleUnits(module, name, everything, is_whole(module))
            return
        own = units_of(module, recurse=False)
        if own or not name:
            found[id(module)] = ModuleUnits(module, name, own)
        for child, inner in module.named_children():
            visit(inner, f"{name}.{child}" if name else child)

    visit(model, "")
    return list(found.values())


def needed_elements(users: Sequence[ModuleUnits]) -> int:
    """Elements that are whole at once where one module runs and another one is fetched ahead, at most.

    A module needs its own units and those of the modules that it is inside of.
    """
    sizes = {unit.index: unit.layout.padded for user in users for unit in user.units}

    def size(units: Collection[int]) -> int:
        return sum(sizes[index] for index in units)

    apart = sorted(({unit.index for unit in user.units} for user in users), key=size, reverse=True)
    most, running = 0, list[ModuleUnits]()
    for user in users:
        while running and running[-1].name and not user.name.startswith(f"{running[-1].name}."):
            running.pop()
        running.append(user)
        own = {unit.index for other in running for unit in other.units}
        most = max(most, size(own) + next((size(other) for other in apart if own.isdisjoint(other)), 0))
    return most


def _is_called(module: nn.Module) -> bool:
    """False for containers like `ModuleList`, which have no forward of their own."""
    return type(module).forward is not nn.Module.forward
