"""Layers whose weight is packed codes of 1 to 8 bits: buffers in place of the parameter, in the layer that it was.

A layer is changed in place: `weight` becomes a property that makes the values anew, and the codes are the persistent
buffers `weight_codes`, `weight_scales` and, if they are asymmetric, `weight_offsets`. Casts of the model leave these in
fp32. Products of linear layers read symmetric codes of 8 and 4 bits without making the matrix, and embeddings make only
the rows that they look up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpispeed.base.stand_ins import stand_in, uncast
from mpispeed.native import weight_codes
from mpispeed.native.packed_codes import PackedCodes
from mpispeed.nn.compression.layers import LayerState, make_compressible, plain_class, quantized_input, state_of
from mpispeed.nn.compression.techniques import ACTIVATIONS

CODES, SCALES, OFFSETS = "weight_codes", "weight_scales", "weight_offsets"
"""Names of the buffers."""

_FACTS = "_packed_weight"
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(slots=True)
class _Facts:
    """Facts beside the buffers. `dtype` is that of the weight; casts of the model change it."""

    bits: int
    shape: tuple[int, ...]
    is_signed: bool
    dtype: torch.dtype


def pack_weight(layer: nn.Module, packed: PackedCodes) -> None:
    """Give a layer codes for its weight, whose parameter goes; values keep its dtype."""
    dtype = cast("Tensor", layer._parameters.pop("weight")).dtype
    layer.register_buffer(CODES, packed.codes)
    layer.register_buffer(SCALES, packed.scales)
    if packed.offsets is not None:
        layer.register_buffer(OFFSETS, packed.offsets)
    layer.__dict__[_FACTS] = _Facts(packed.bits, packed.shape, packed.is_signed, dtype)
    layer.__class__ = _class_of(type(layer))


def packed_weight(layer: nn.Module) -> PackedCodes | None:
    """The codes of a layer; None if its weight is not packed."""
    facts: _Facts | None = layer.__dict__.get(_FACTS)
    if facts is None:
        return None
    found: dict[str, Any] = layer._buffers
    return PackedCodes(found[CODES], found[SCALES], found.get(OFFSETS), facts.bits, facts.shape, facts.is_signed)


def _class_of(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name that has codes; `base` may be a compressible one."""
    if base not in _classes:
        _classes[base] = _packed_class(base)
    return _classes[base]


def _packed_class(base: type[nn.Module]) -> type[nn.Module]:
    def weight(self: nn.Module) -> Tensor:
        dtype: torch.dtype = self.__dict__[_FACTS].dtype
        return _codes(self).values(dtype)

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return _apply(self, base, fn, recurse)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        _, _, *rest = cast("tuple[Any, ...]", base.__reduce_ex__(self, protocol))
        return _rebuilt, (plain, plain is not base), *rest

    plain = plain_class(base)
    members: dict[str, Any] = {"weight": property(weight), "_apply": apply, "__reduce_ex__": reduce}
    forward = {nn.Linear.forward: _multiply, nn.Embedding.forward: _look_up}.get(cast("Any", plain).forward)
    if forward is not None:
        members["forward"] = forward
    return stand_in(base, members)


def _rebuilt(base: type[nn.Module], is_compressible: bool) -> nn.Module:
    """An empty layer, for copies and pickles."""
    layer: nn.Module = base.__new__(base)
    if is_compressible:
        make_compressible(layer, cast("LayerState", None))  # what follows brings it
    layer.__class__ = _class_of(type(layer))
    return layer


def _codes(layer: nn.Module) -> PackedCodes:
    return cast("PackedCodes", packed_weight(layer))


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`; of codes that products can read, without the matrix."""
    state = state_of(layer)
    if state is not None and ACTIVATIONS in state.active:
        x = quantized_input(layer, x)
    matrix = _codes(layer).as_matrix()
    return nn.Linear.forward(layer, x) if matrix is None else weight_codes.linear(x, matrix, layer.bias)


def _look_up(layer: nn.Embedding, index: Tensor) -> Tensor:
    """`nn.Embedding.forward`; where rows begin at bytes and have scales of their own, without the other rows."""
    packed = _codes(layer)
    rows, width = packed.shape
    if layer.max_norm is not None or packed.scales.numel() != rows or width * packed.bits % 8:
        return nn.Embedding.forward(layer, index)
    flat = index.reshape(-1)
    # Not by indexing, to which numbers below 0, and bytes, mean something else.
    own, scales = packed.codes.view(rows, -1).index_select(0, flat).view(-1), packed.scales.index_select(0, flat)
    offsets = None if packed.offsets is None else packed.offsets.index_select(0, flat)
    picked = packed._replace(codes=own, scales=scales, offsets=offsets, shape=(len(flat), width))
    return picked.values(layer.__dict__[_FACTS].dtype).view(*index.shape, width)


def _apply(layer: nn.Module, base: type[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """`nn.Module._apply` under which scales and offsets keep their dtype."""
    buffers: dict[str, Any] = layer._buffers
    with uncast(buffers, (name for name in (SCALES, OFFSETS) if name in buffers)):
        base._apply(layer, fn, recurse)
    facts: _Facts = layer.__dict__[_FACTS]
    facts.dtype = fn(torch.empty(0, dtype=facts.dtype, device=buffers[CODES].device)).dtype
    return layer
