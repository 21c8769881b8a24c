"""Conversion of a model to random-LTD, the numbers of its layers, and weights under the names of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.routing.token_drop import LayerRoute, route_of

WRAPPER = ".random_ltd_layer"
"""What DeepSpeed's wrapper puts into names of parameters."""

ModelT = TypeVar("ModelT")


def convert_to_random_ltd(model: ModelT, convert_type: type[nn.Module]) -> ModelT:
    """Let layers of a class drop tokens in training, those whose numbers are in `random_ltd_layer_id`.

    Names of parameters stay as they are. On an engine, call it after `initialize`, on all ranks; a model may also be
    converted before it is given to `initialize`.

    Args:
        model: an engine, or a model.
        convert_type: the class of the layers.

    Returns:
        `model`.

    Collective over: the pipeline stages, for an engine.

    Raises:
        ConfigError: (a ValueError) there is no such layer, random-LTD is not enabled in the config of the engine, or
            the numbers of layers do not fit.
    """
    inner: Any = getattr(model, "module", model)
    found = [layer for layer in inner.modules() if isinstance(layer, convert_type)]
    for layer in found:
        if route_of(layer) is None:
            LayerRoute(layer)
    begin = getattr(model, "random_ltd_initialize", None)
    if begin is not None:
        begin()
    elif hasattr(model, "mpispeed"):
        msg = (
            "convert_to_random_ltd: random-LTD is off in this engine; set data_efficiency.enabled, "
            "data_efficiency.data_routing.enabled and data_efficiency.data_routing.random_ltd.enabled to true"
        )
        raise ConfigError(msg)
    elif not found and getattr(inner, "num_stages", 1) == 1:  # a stage of a pipeline may have none
        msg = f"convert_to_random_ltd: the model has no layer of class {convert_type.__name__}"
        raise ConfigError(msg)
    return model


def routes_of(model: nn.Module) -> dict[str, LayerRoute]:
    """The routes of converted layers, by the names of the layers."""
    found = ((name, route_of(layer)) for name, layer in model.named_modules())
    return {name: route for name, route in found if route is not None}


def dropping_layers(names: Iterable[str], wanted: Sequence[int], count: int | None = None) -> dict[str, int]:
    """Which of the converted layers of a model drop tokens: their names, with their places in the order of numbers.

    The number of a layer is the last whole number that ends a part of its name, as in "model.layers.11" or "layer3".

    Args:
        names: of the converted layers of the whole model, on all stages of a pipeline.
        wanted: numbers of layers.
        count: how many there have to be; None: as many as are wanted.

    Raises:
        ConfigError: (a ValueError) the counts differ, a layer is missing, or two layers have one number.
    """
    names, found = list(names), dict[int, str]()
    for name in names:
        number = _number(name)
        if number is not None and number in wanted:
            if number in found:
                msg = (
                    f"random_ltd: the converted layers {found[number]!r} and {name!r} both have the number {number}; "
                    "convert layers of one stack only"
                )
                raise ConfigError(msg)
            found[number] = name
    missing = [number for number in wanted if number not in found]
    if missing:
        told = ", ".join(map(repr, names)) or "none"
        msg = (
            f"random_ltd.random_ltd_layer_id has {', '.join(map(str, missing))}, and no converted layer has such a "
            f"number; converted: {told}"
        )
        raise ConfigError(msg)
    if count is not None and count != len(found):
        msg = f"random_ltd.random_ltd_layer_num is {count}, but {len(found)} layers were converted: {sorted(found)}"
        raise ConfigError(msg)
    return {found[number]: place for place, number in enumerate(sorted(found))}


def _number(name: str) -> int | None:
    ends = (re.search(r"\d+$", part) for part in reversed(name.split(".")))
    return next((int(end.group()) for end in ends if end is not None), None)


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The state dict of a model or of an engine's model, under the names of the model. Local."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the wrappers of layers in its names: those of `RandomLayerTokenDrop` and of DeepSpeed."""
    return {name.replace(WRAPPER, ""): value for name, value in state_dict.items()}
