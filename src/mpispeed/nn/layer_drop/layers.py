"""Layers that may be left out: their class is replaced by one that is called only where a pass keeps the layer.

Nothing else about a layer changes: not its name, its parameters, its attributes or what `isinstance` says. The decision
stands before hooks of the module, so that a layer that is left out gathers no parameters and is not recomputed.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from mpispeed.base import rng
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.stand_ins import stand_in
from mpispeed.nn.layer_drop.decisions import Depth, LayerDrop

if TYPE_CHECKING:
    from mpispeed.base.passes import Pass

_MARK = "_mpispeed_drops"
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def convert_to_layer_drop(model: nn.Module, layer_type: type[nn.Module] | Sequence[type[nn.Module]]) -> nn.Module:
    """Let progressive layer drop leave out the layers of these types in `model`; returns it.

    For layers that map a residual stream to itself: they take it as their first argument, alone or as first member of a
    tuple, and return it, alone or as first member of a tuple whose others they hand through. Call it before
    `initialize`. Without `progressive_layer_drop` in the config, and in evaluation, such layers always run. A
    `DeepSpeedTransformerLayer` needs no call.

    Raises:
        ConfigError: the model has no such layer.
    """
    types = (layer_type,) if isinstance(layer_type, type) else tuple(layer_type)
    found = [module for module in model.modules() if isinstance(module, types)]
    if not found:
        names = " or ".join(each.__name__ for each in types)
        msg = (
            f"the model, a {type(model).__name__}, has no layer of the type {names}; give convert_to_layer_drop the "
            "class of its repeated blocks"
        )
        raise ConfigError(msg)
    for module in found:
        make_droppable(module)
    return model


def make_droppable(layer: nn.Module) -> None:
    """Let one layer be left out. No effect if it can be already."""
    known = type(layer)
    if not hasattr(known, _MARK):
        if known not in _classes:
            _classes[known] = _droppable(known)
        layer.__class__ = _classes[known]


def find_droppable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that can be left out, by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(type(module), _MARK)}


def _droppable(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose calls may be left out."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return base.__call__(self, *args, **kwargs)
        return _Steps.run(self, base.__call__, args, kwargs)

    return stand_in(base, {"__call__": call, _MARK: True}, _rebuilt)


def _rebuilt(base: type[nn.Module]) -> nn.Module:
    """An empty layer, for copies and pickles."""
    layer: nn.Module = base.__new__(base)
    make_droppable(layer)
    return layer


@dataclass(slots=True)
class Shape:
    """The outputs of layers of one class, in terms of their inputs.

    Attributes:
        kind: None for a tensor, else the type of the tuple.
        sources: for each member after the first the name or place of the argument that it is; None for None.
    """

    kind: type | None
    sources: list[int | str | None] = field(default_factory=list)


Form = frozenset[tuple[int | str, bool]]
"""Names or places of the arguments of a call, and whether each is None: what is returned hangs on it."""

Shapes = dict[type, dict[Form, Shape]]


class Taking:
    """The part that one layer has in the decisions of its model."""

    def __init__(self, drop: LayerDrop, depth: Depth, shapes: Shapes) -> None:
        """Args: `shapes` is filled as layers run; all layers of a model share it."""
        self.drop, self.depth, self.shapes = drop, depth, shapes


def _run(layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The output of a layer, scaled, or its input.

    Raises:
        UsageError: the layer is none of those that can be left out.
    """
    taking, scale = _Steps.decide(layer)
    if taking is None or (scale == 1.0 and type(layer) in taking.shapes):
        return call(layer, *args, **kwargs)
    if isinstance(layer, ScalesResiduals):
        if not scale:
            return layer.without_branches(*args, **kwargs)
        return call(layer, *args, **kwargs, residual_scale=scale)
    given = _Given(layer, args, kwargs)
    if scale:
        return _Steps.scaled(given, call(layer, *args, **kwargs), scale, taking.shapes)
    if given.form not in taking.shapes.get(type(layer), ()):
        with _without_traces():
            given.learn(call(layer, *args, **kwargs), taking.shapes)
    return given.left_out(taking.shapes[type(layer)][given.form])


def _decide(layer: nn.Module) -> tuple[Taking | None, float]:
    taking = _taking.get(layer)
    return taking, 1.0 if taking is None else taking.drop.scale(taking.depth)


def _scaled(given: _Given, out: Any, scale: float, shapes: Shapes) -> Any:
    given.learn(out, shapes)
    return out if scale == 1.0 else given.scaled(out, scale)


class _Steps:
    """The functions around a call of a layer; once a compiler is loaded, those that it does not trace.

    It would make decisions once, and for one layer. What the layer itself runs is compiled.
    """

    run, decide, scaled = staticmethod(_run), staticmethod(_decide), staticmethod(_scaled)
    is_shielded = False

    @classmethod
    def shield(cls) -> None:
        """Keep the compiler out, if there is one: it loads slowly."""
        if not cls.is_shielded and "torch._dynamo" in sys.modules:
            cls.is_shielded = True
            cls.run = staticmethod(torch.compiler.disable(_run, recursive=False))
            cls.decide = staticmethod(torch.compiler.disable(_decide))
            cls.scaled = staticmethod(torch.compiler.disable(_scaled))


@runtime_checkable
class ScalesResiduals(Protocol):
    """Interface of layers that take a `residual_scale`: the factor of what each branch adds to the residual stream."""

    def without_branches(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns if no branch adds anything."""


class _Given:
    """The arguments of a layer."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.layer = layer
        first = args[0] if args else kwargs.get(next(iter(inspect.signature(layer.forward).parameters), ""))
        self.parts: dict[int | str, Any]
        if isinstance(first, tuple):
            self.parts, first = dict(enumerate(first)), first[0] if first else None
        else:
            self.parts = dict(enumerate(args))
            self.parts.update(kwargs)
        if not isinstance(first, torch.Tensor):
            reason = f"its first argument is a {type(first).__name__}; expected the residual stream"
            raise self._refused(reason)
        self.stream = first
        self.form: Form = frozenset((name, part is None) for name, part in self.parts.items())

    def learn(self, out: Any, shapes: Shapes) -> None:
        """Note what layers of this class return when they are called so."""
        known = shapes.setdefault(type(self.layer), {})
        if self.form not in known:
            known[self.form] = self._shape_of(out)

    def _shape_of(self, out: Any) -> Shape:
        if isinstance(out, torch.Tensor):
            self._check(out)
            return Shape(None)
        if not isinstance(out, tuple) or not out or not isinstance(out[0], torch.Tensor):
            reason = f"it returns a {type(out).__name__}; expected a tensor, or a tuple that begins with it"
            raise self._refused(reason)
        self._check(out[0])
        sources: list[int | str | None] = []
        for place, member in enumerate(out[1:], 1):
            source = next((name for name, part in self.parts.items() if part is member), None)
            if source is None and member is not None:
                reason = f"member {place} of the tuple that it returns is none of its arguments"
                raise self._refused(reason)
            sources.append(source if member is not None else None)
        return Shape(type(out), sources)

    def _check(self, out: torch.Tensor) -> None:
        if out.shape != self.stream.shape:
            reason = f"it turns shape {tuple(self.stream.shape)} into {tuple(out.shape)}"
            raise self._refused(reason)

    def left_out(self, shape: Shape) -> Any:
        others = [None if source is None else self.parts.get(source) for source in shape.sources]
        return self.stream if shape.kind is None else _made(shape.kind, (self.stream, *others))

    def scaled(self, out: Any, scale: float) -> Any:
        if isinstance(out, torch.Tensor):
            return _stretched(self.stream, out, scale)
        return _made(type(out), (_stretched(self.stream, out[0], scale), *out[1:]))

    def _refused(self, reason: str) -> UsageError:
        return UsageError(
            f"a layer of the type {type(self.layer).__name__} cannot be left out by progressive layer drop: {reason}; "
            "convert layers that map a residual stream to itself"
        )


def _stretched(x: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
    """The sum x + scale (out - x)."""
    return torch.lerp(x, out, scale) if x.dtype == out.dtype else x + (out - x) * scale


def _made(kind: type, members: tuple[Any, ...]) -> Any:
    return kind(*members) if hasattr(kind, "_fields") else kind(members)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Context of a call whose result is thrown away: without a graph, with random numbers as before it."""
    tracker, states = rng.get_rng_tracker(), rng.capture_torch()
    streams = tracker.get_states()
    try:
        with torch.no_grad():
            yield
    finally:
        rng.restore_torch(states)
        tracker.set_states(streams)


_taking: weakref.WeakKeyDictionary[nn.Module, Taking] = weakref.WeakKeyDictionary()
"""Not an attribute of the layer: copies and pickles of a layer have no part in anything."""


def take_part(layers: Mapping[nn.Module, Depth], drop: LayerDrop) -> Callable[[], None]:
    """Let `drop` decide about layers from now on; returns what ends it.

    `passes` of `drop` have to begin before compiled code runs: only then a compiler has been loaded, which is slow.
    """
    shapes: Shapes = {}
    own = {layer: Taking(drop, depth, shapes) for layer, depth in layers.items()}
    _taking.update(own)

    def shield(_: Pass) -> None:
        _Steps.shield()

    drop.passes.listeners.append(shield)

    def end() -> None:
        drop.passes.listeners.remove(shield)
        for layer, taking in own.items():
            if _taking.get(layer) is taking:
                del _taking[layer]

    return end
