"""External parameters: those that a module's forward uses although another module owns them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.sharding import sharded_param
from mpispeed.sharding.params import ParamStore

if TYPE_CHECKING:
    from mpispeed.sharding.module_hooks import ModuleHooks
    from mpispeed.store.layout import Table, Unit

# Modules with the parameters registered on them, whether or not an engine has them yet.
_REGISTERED: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Unshard `parameter` too whenever `module` runs. Works before `initialize`, and on a running engine.

    Not needed for correctness: reading a sharded parameter in any forward unshards it. Registered ones are fetched
    together with the module's own, and ahead of time from the first pass on. It changes nothing inside of a block that
    is fetched as one, and where parameters are replicated.

    Raises:
        UsageError: (a RuntimeError) an argument is of a wrong type.
    """
    _check(module, parameter)
    known = _REGISTERED.setdefault(module, [])
    if not any(parameter is other for other in known):
        known.append(parameter)
    owner, module_hooks = _running(parameter)
    if owner is not None and module_hooks is not None:
        module_hooks.add_external(module, _units(owner.table, [parameter]))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

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
    owner, module_hooks = _running(parameter)
    if owner is not None and module_hooks is not None:
        needed = _units(owner.table, [*known, *module.parameters()])
        module_hooks.drop_external(module, [unit for unit in _units(owner.table, [parameter]) if unit not in needed])


def watch_external(model: nn.Module, table: Table, module_hooks: ModuleHooks) -> None:
    """Tell new `module_hooks` about the parameters registered on modules of `model` so far."""
    for module in model.modules():
        if module in _REGISTERED:
            module_hooks.add_external(module, _units(table, _REGISTERED[module]))


def _running(parameter: nn.Parameter) -> tuple[ParamStore | None, Any]:
    owner = sharded_param.owner_of(parameter)
    return (owner, owner.reader) if isinstance(owner, ParamStore) else (None, None)


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
