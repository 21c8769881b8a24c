"""Descriptions of layers: specs, built on the ranks that own them, and existing modules or functions.

Behaviour and names follow DeepSpeed's documentation of pipeline parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpispeed.base.errors import StageError

Function = Callable[..., Any]


class LayerSpec:
    """A layer that is built later, and only by the ranks that own it.

    Args:
        typename: a subclass of torch.nn.Module.
        module_args: positional arguments of its constructor.
        spreads_inputs: call the layer as `layer(*x)` where the layer before returned a tuple or list, and as
            `layer(**x)` where it returned a mapping. By default a layer gets the output before as one argument.
        module_kwargs: keyword arguments of its constructor.

    Raises:
        StageError: `typename` is no subclass of torch.nn.Module; a RuntimeError too.
    """

    def __init__(self, typename: type, *module_args: Any, spreads_inputs: bool = False, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            msg = f"{type(self).__name__}: {typename!r} is no subclass of torch.nn.Module; functions need no spec"
            raise StageError(msg)
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs
        self.spreads_inputs = spreads_inputs

    def build(self, log: bool = False) -> nn.Module:
        """Make the module. `log` is accepted for DeepSpeed scripts and has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def _described(self) -> list[str]:
        words = [self.typename.__name__, *(repr(value) for value in self.module_args)]
        return words + [f"{name}={value!r}" for name, value in self.module_kwargs.items()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._described())})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same `key`.

    Each stage that uses the key builds one module, from the first use in the model. All its parameters start equal and
    their gradients are summed over these stages, so that the result does not depend on the number of stages.

    Args:
        key: name of the shared module; its parameters are called `tied_modules.<key>.<name>`.
        typename: a subclass of torch.nn.Module, the same for all uses of a key.
        module_args: positional arguments of its constructor.
        forward_fn: `forward_fn(module, x)` in place of `module(x)`.
        tied_weight_attr: attributes that hold the shared weights, dotted where they are deeper; they have to exist.
            Parameters that are not named here are shared all the same.
        spreads_inputs: as for LayerSpec; the module stays the first argument of `forward_fn`.
        module_kwargs: keyword arguments of its constructor.
    """

    def __init__(
        self,
        key: str,
        typename: type,
        *module_args: Any,
        forward_fn: Function | None = None,
        tied_weight_attr: str | Iterable[str] = ("weight",),
        spreads_inputs: bool = False,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, spreads_inputs=spreads_inputs, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key or hasattr(nn.ModuleDict, key):
            msg = (
                f"TiedLayerSpec: the key {key!r} has to be a text without dots, and no method of nn.ModuleDict: "
                "parameters are named after it"
            )
            raise StageError(msg)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def _described(self) -> list[str]:
        return [repr(self.key), *super()._described()]


@dataclass(frozen=True, slots=True)
class Spread:
    """An existing layer that takes the output of the layer before as several arguments."""

    layer: Function


def spread(layer: Function) -> Spread:
    """Mark a module or function of a list of layers: it is called as `layer(*x)`, or `layer(**x)` for a mapping.

    Specs have the argument `spreads_inputs` instead.
    """
    return Spread(layer)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model: its global index, its source as given by the user, and the way its input is passed."""

    index: int
    source: Any
    spreads: bool = False

    @property
    def name(self) -> str:
        """Name of the class or function, as `type:REGEX` and `checkpointable_layers` match it."""
        return name_of(self.source)

    @property
    def tie(self) -> TiedLayerSpec | None:
        """The spec, if the layer is tied to others."""
        return self.source if isinstance(self.source, TiedLayerSpec) else None


def made(layer: Layer) -> nn.Module:
    """Build the module of a spec.

    Raises:
        StageError: its constructor fails.
    """
    try:
        return layer.source.build()
    except Exception as error:
        msg = f"layer {layer.index} ({layer.name}) cannot be built: {type(error).__name__}: {error}"
        raise StageError(msg) from error


def name_of(source: Any) -> str:
    """Class name of a module or of a spec's module, the name of a function."""
    if isinstance(source, LayerSpec):
        return source.typename.__name__
    if isinstance(source, nn.Module):
        return type(source).__name__
    if isinstance(source, functools.partial):
        return name_of(source.func)
    return getattr(source, "__name__", type(source).__name__)


def read_layers(layers: Iterable[Any]) -> list[Layer]:
    """Number the layers of a model; refuse anything that is no layer.

    Args:
        layers: an nn.Sequential, or any iterable of specs, modules, functions, and `spread` ones.

    Raises:
        StageError: there is no layer; something is no layer; uses of one key differ in their type.
    """
    found: list[Layer] = []
    if not isinstance(layers, Iterable):
        msg = f"the layers are a {type(layers).__name__}; pass a list of layers, or an nn.Sequential"
        raise StageError(msg)
    for index, given in enumerate(layers):
        source, spreads = (given.layer, True) if isinstance(given, Spread) else (given, False)
        if isinstance(source, LayerSpec):
            spreads = spreads or source.spreads_inputs
        elif isinstance(source, type):
            kind = source.__name__
            msg = f"layer {index} is the class {kind}; pass a module, {kind}(...), or its spec, LayerSpec({kind}, ...)"
            raise StageError(msg)
        elif not callable(source):
            msg = f"layer {index} is {source!r}; a layer is a LayerSpec, a module, or a function of the layer before it"
            raise StageError(msg)
        found.append(Layer(index, source, spreads))
    if not found:
        msg = "a pipeline needs at least one layer; the list of layers is empty"
        raise StageError(msg)
    _check_ties(found)
    return found


def first_uses(layers: Iterable[Layer]) -> dict[str, Layer]:
    """The first layer of each key, in the order of keys."""
    first: dict[str, Layer] = {}
    for layer in layers:
        if layer.tie is not None:
            first.setdefault(layer.tie.key, layer)
    return dict(sorted(first.items()))


def _check_ties(layers: list[Layer]) -> None:
    first = first_uses(layers)
    for layer in layers:
        tie = layer.tie
        if tie is not None and tie.typename is not (known := first[tie.key].source).typename:
            msg = (
                f"layers {first[tie.key].index} and {layer.index} are tied as {tie.key!r} but are of the types "
                f"{name_of(known)} and {layer.name}; tied layers are one module: name one type, and give the other use "
                "a forward_fn"
            )
            raise StageError(msg)


def shared_parameters(layers: Iterable[Layer]) -> dict[int, tuple[int, str]]:
    """For each layer given as a module: the earlier layer that has one of its parameters, and the parameter's name."""
    owner: dict[int, int] = {}
    shared: dict[int, tuple[int, str]] = {}
    for layer in layers:
        if isinstance(layer.source, nn.Module):
            for name, param in layer.source.named_parameters():
                first = owner.setdefault(id(param), layer.index)
                if first != layer.index:
                    shared.setdefault(layer.index, (first, name))
    return shared


def call(function: Function, x: Any, *, spreads: bool) -> Any:
    """Apply a layer to the output of the one before."""
    if spreads and isinstance(x, Mapping):
        return function(**x)
    if spreads and isinstance(x, tuple | list):
        return function(*x)
    return function(x)
