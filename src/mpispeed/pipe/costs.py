"""Time and memory of each layer, measured, and the partition that balances them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mpispeed.base import rng
from mpispeed.base.errors import StageError
from mpispeed.pipe.cut import partition_bottleneck
from mpispeed.pipe.layers import Layer, LayerSpec, call, made

REPEATS = 3
SLACK = 0.05
"""Times of a measurement scatter by so much; a stage may be slower by it where that saves memory."""

STATES = 4
"""Copies of a trainable parameter: itself, its gradient, two states of Adam."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer with one micro-batch.

    Attributes:
        seconds: forward and backward.
        state_bytes: parameters with gradients and optimizer states.
        activation_bytes: what autograd keeps for the backward pass, parameters left out.
    """

    seconds: float
    state_bytes: int
    activation_bytes: int


def cut_by_profile(layers: Sequence[Layer], sample: Any, num_stages: int, num_chunks: int) -> list[int]:
    """Borders that make the slowest virtual stage as fast as possible, within 5 % the one with the smallest peak.

    Memory of a stage counts its states once and its activations for as many micro-batches as the 1F1B schedule has
    under way there.

    Raises:
        StageError: there is no sample, or a layer fails on it.
    """
    if sample is None:
        msg = "partition_method='profile' measures layers: pass profile_input=, what the first layer gets"
        raise StageError(msg)
    costs = measure(layers, sample)
    loads = [
        [cost.state_bytes + cost.activation_bytes * (num_stages - part % num_stages) for cost in costs]
        for part in range(num_stages * num_chunks)
    ]
    return partition_bottleneck([cost.seconds for cost in costs], len(loads), loads=loads, slack=SLACK)


def measure(layers: Sequence[Layer], sample: Any) -> list[Cost]:
    """Run each layer forward and backward on the output of the one before; one layer at a time is in memory.

    Generators stay as they are.

    Args:
        layers: all layers; specs are built for the measurement.
        sample: the input of the first layer.

    Raises:
        StageError: a layer fails.
    """
    generators, costs, x = rng.capture(), list[Cost](), sample
    try:
        for layer in layers:
            try:
                cost, x = _measure_layer(layer, x)
            except Exception as error:
                msg = (
                    f"partition_method='profile': layer {layer.index} ({layer.name}) fails on the sample: "
                    f"{type(error).__name__}: {error}"
                )
                raise StageError(msg) from error
            costs.append(cost)
    finally:
        rng.restore(generators)
    return costs


def _measure_layer(layer: Layer, x: Any) -> tuple[Cost, Any]:
    source: Any = made(layer) if isinstance(layer.source, LayerSpec) else layer.source
    params = list(source.parameters()) if isinstance(source, nn.Module) else []
    kept = [param.grad for param in params]
    forward = layer.tie.forward_fn if layer.tie is not None else None

    def run() -> Any:
        given = pytree.tree_map(_fresh, x)
        return call(source, given, spreads=layer.spreads) if forward is None else _tied(forward, source, given, layer)

    try:
        for param in params:
            param.grad = None
        out, activation_bytes = _saved_bytes(run, params)
        _backward(out)  # the first run is slower
        seconds = [_timed(run) for _ in range(REPEATS)]
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
    state_bytes = sum(param.nbytes * (STATES if param.requires_grad else 1) for param in params)
    return Cost(statistics.median(seconds), state_bytes, activation_bytes), pytree.tree_map(_detached, out)


def _tied(forward: Any, module: nn.Module, x: Any, layer: Layer) -> Any:
    return call(lambda *args, **kwargs: forward(module, *args, **kwargs), x, spreads=layer.spreads)


def _timed(run: Any) -> float:
    _synchronize()
    begin = time.perf_counter()
    _backward(run())
    _synchronize()
    return time.perf_counter() - begin


def _saved_bytes(run: Any, params: Sequence[nn.Parameter]) -> tuple[Any, int]:
    """Output, and the bytes that its backward pass keeps; storages count once."""
    known = {param.untyped_storage().data_ptr() for param in params}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return out, sum(storages.values())


def _backward(out: Any) -> None:
    ends = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    ends = [end for end in ends if end.grad_fn is not None]  # a layer may hand its input on
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    return leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
