"""Engines and their models: a model keeps its engine alive; given to a new engine, its old one is destroyed."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from mpispeed.base.events import Event

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from mpispeed.engine.engine import Engine
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh

log = logging.getLogger(__name__)

_ENGINES: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""Engines by number; all ranks create the same engines in the same order."""

_NUMBERS = itertools.count()


_HELD = "_mpispeed_held"


class _Held:
    """Holds engines in the attributes of a parameter: several, if their models share it frozen. Copies hold none."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # which torch's loader of weights knows


def register(engine: Engine) -> None:
    """Add an engine, for as long as it lives: as long as a script has the engine or a parameter of its model.

    A script may keep the model or the optimizer alone. Hooks of a parameter could not hold the engine: the garbage
    collector does not see that autograd has them, so engine and model would live for ever.
    """
    _ENGINES[next(_NUMBERS)] = engine
    params = list(engine.module.parameters())
    for param in params:
        held = vars(param).get(_HELD)
        if not isinstance(held, _Held):  # a loaded copy holds something else
            held = vars(param)[_HELD] = _Held()
        held.engines.append(engine)
    me = weakref.ref(engine)
    engine.mpispeed.parts.bus.subscribe(Event.CLOSE, lambda _: _let_go(params, me()))


def _let_go(params: Iterable[torch.Tensor], engine: Engine | None) -> None:
    """Forget an engine, of which others may go on with a parameter."""
    for param in params:
        held = vars(param).get(_HELD)
        if isinstance(held, _Held):
            held.engines[:] = [each for each in held.engines if each is not engine]
            if not held.engines:
                del vars(param)[_HELD]


def engine_of(model: nn.Module) -> Engine | None:
    """The newest open engine whose parameters all belong to `model`, or that trains one of them; else None. Local."""
    params = {id(param): param for param in model.parameters()}
    found: dict[int, Engine] = {}
    for param in params.values():
        held = vars(param).get(_HELD)
        for engine in held.engines if isinstance(held, _Held) else ():
            if param.requires_grad or all(id(own) in params for own in engine.module.parameters()):
                found[id(engine)] = engine
    return max(found.values(), key=_number_of, default=None)


def _number_of(engine: Engine) -> int:
    return next(number for number, each in _ENGINES.items() if each is engine)


def newest_mesh() -> Mesh | None:
    """The mesh of the engine that was made last and is open; None without one."""
    open_ones = [number for number, engine in _ENGINES.items() if not engine.mpispeed.parts.is_closed]
    return _ENGINES[max(open_ones)].mpispeed.parts.mesh if open_ones else None


def destroy_all(comm: Comm) -> None:
    """Destroy all open engines, newest first; those that some ranks have let go of lose their hooks.

    Collective over: all ranks.
    """
    gc.collect()  # so that unreferenced engines are gone on all ranks alike
    own = {number: engine for number, engine in _ENGINES.items() if not engine.mpispeed.parts.is_closed}
    common = set.intersection(*map(set, comm.gather_objects(sorted(own))))
    for number, engine in sorted(own.items(), reverse=True):
        if number in common:
            engine.destroy()
        elif engine.mpispeed.parts.optimization is not None:
            engine.mpispeed.parts.optimization.hooks.remove()


def release(model: nn.Module, comm: Comm) -> None:
    """Destroy engines of `model` or of a part of it; the model keeps its weights.

    An engine that some ranks have garbage-collected only loses its hooks, since `destroy` is collective.

    Collective over: all ranks.
    """
    own = _owners(model)
    if own:
        gc.collect()  # so that unreferenced engines are gone on all ranks alike
        own = _owners(model)
    common = set.intersection(*map(set, comm.gather_objects(sorted(own))))
    for number, engine in sorted(own.items()):
        if number in common:
            if comm.rank == 0:
                log.warning("the model is given to a new engine; the one that had it is destroyed")
            engine.destroy()
        elif engine.mpispeed.parts.optimization is not None:
            engine.mpispeed.parts.optimization.hooks.remove()


def _owners(model: nn.Module) -> dict[int, Engine]:
    """Open engines whose parameters all belong to `model`."""
    wanted = {id(param) for param in model.parameters()}
    found: dict[int, Engine] = {}
    for number, engine in _ENGINES.items():
        own = {id(param) for param in engine.module.parameters()}
        if not engine.mpispeed.parts.is_closed and own and own <= wanted:
            found[number] = engine
    return found
