"""Which modules need which units while they run: where fetches are announced and units given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mpispeed.store.table import Table, Unit
from mpispeed.zero.units import block_names


@dataclass(frozen=True, slots=True)
class User:
    """A module whose forward needs `units`; `name` is its place in the model."""

    module: nn.Module
    name: str
    units: tuple[Unit, ...]


def find_users(
    model: nn.Module, table: Table, *, needs: Callable[[Unit], bool], is_whole: Callable[[nn.Module], bool]
) -> list[User]:
    """The modules to watch: the model itself, blocks, and what holds parameters of its own outside of blocks.

    A block that one unit of a kind holds is watched as one; so is a module for which `is_whole` says yes. Inside of
    larger blocks every module that has parameters of its own is watched.

    Args:
        model: the model.
        table: its units.
        needs: whether a unit has to be fetched at all.
        is_whole: whether a module is to be fetched with everything in it.
    """
    blocks = block_names(model)
    found: dict[int, User] = {}

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
            found[id(module)] = User(module, name, everything)
            return
        own = units_of(module, recurse=False)
        if own or not name:
            found[id(module)] = User(module, name, own)
        for child, inner in module.named_children():
            visit(inner, f"{name}.{child}" if name else child)

    visit(model, "")
    return list(found.values())


def _is_called(module: nn.Module) -> bool:
    """Containers like `ModuleList` have no forward of their own; only what is in them is called."""
    return type(module).forward is not nn.Module.forward
