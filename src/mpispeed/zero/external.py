"""Parameters that a module's forward uses although another module has them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.zero import guard
from mpispeed.zero.params import ParamStore

if TYPE_CHECKING:
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.frames import Frames

# Modules with what was registered on them, whether an engine has them yet or not.
_REGISTERED: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Fetch `parameter` too whenever `module` runs. Works before `initialize`, and on a running engine.

    Not needed for right results: reading a cut parameter in any forward fetches it. Registered ones are fetched
    together with the module's own, and ahead of time from the first pass on. Inside of a block that is fetched as
    one, and where parameters are whole, it changes nothing.

    Raises:
        UsageError: (a RuntimeError) an argument is of a wrong type.
    """
    _check(module, parameter)
    known = _REGISTERED.setdefault(module, [])
    if not any(parameter is other for other in known):
        known.append(parameter)
    keeper, frames = _running(parameter)
    if keeper is not None and frames is not None:
        frames.add_external(module, _units(keeper.table, [parameter]))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """End of `register_external_parameter`.

    Raises:
        UsageError: (a RuntimeError) an argument is of a wrong type, or the parameter was not registered there.
    """
    _check(module, parameter)
    known = _REGISTERED.get(module, [])
    if not any(parameter is other for other in known):
        msg = (
            f"unregister_external_parameter: no such parameter was registered on this {type(module).__name__}, "
            f"which has {len(known)} registered ones"
        )
        raise UsageError(msg)
    known[:] = [other for other in known if other is not parameter]
    keeper, frames = _running(parameter)
    if keeper is not None and frames is not None:
        needed = _units(keeper.table, [*known, *module.parameters()])
        frames.drop_external(module, [unit for unit in _units(keeper.table, [parameter]) if unit not in needed])


def watch_external(model: nn.Module, table: Table, frames: Frames) -> None:
    """Tell new `frames` what was registered on modules of `model` before."""
    for module in model.modules():
        if module in _REGISTERED:
            frames.add_external(module, _units(table, _REGISTERED[module]))


def _running(parameter: nn.Parameter) -> tuple[ParamStore | None, Any]:
    keeper = guard.keeper_of(parameter)
    return (keeper, keeper.reader) if isinstance(keeper, ParamStore) else (None, None)


def _units(table: Table, params: list[nn.Parameter]) -> list[Unit]:
    places = [table.locate(param) for param in params]
    return list({place.unit.index: place.unit for place in places if place is not None}.values())


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        msg = (
            "external parameters are registered as (module, parameter); found "
            f"({type(module).__name__}, {type(parameter).__name__})"
        )
        raise UsageError(msg)
