"""Linear layers and embeddings with coded weights, sliced over ranks or not.

A layer is changed in place: the object stays, with its class, its hooks and its place in the model; the parameter
`weight` becomes None, and the codes are persistent buffers `weight_codes`, `weight_scales` and, if the codes are not
symmetric, `weight_offsets`. Casts of the model leave these in fp32. Layers of a slicing group keep their sums and
gathers: they multiply by `product`, which alone is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.stand_ins import uncast
from mpispeed.native import weight_codes
from mpispeed.native.weight_codes import WeightCodes
from mpispeed.nn.tensor import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear

CODES, SCALES, OFFSETS = "_codes", "_scales", "_offsets"
"""Ends of the names of buffers, behind the name of the parameter."""

_STATE = "_coded"


@dataclass(frozen=True, slots=True)
class Format:
    """The form of a coded weight.

    Attributes:
        bits: 8 or 4.
        group: elements that share a scale. Those of 4 bits are even.
        is_along_inputs: groups are neighbours among the inputs of one output; else among the outputs of one input. Of
            embeddings: along the width, else along the rows.
        is_symmetric: no offsets.
        is_exact: an error if the size is no multiple of `group`; else the last group is short.
    """

    bits: int = 8
    group: int = 128
    is_along_inputs: bool = True
    is_symmetric: bool = True
    is_exact: bool = False

    def __str__(self) -> str:
        along = "" if self.is_along_inputs else " along outputs"
        return f"int{self.bits}, groups of {self.group}{along}{'' if self.is_symmetric else ', with offsets'}"


@dataclass(slots=True)
class _State:
    """Facts beside the buffers of a parameter: sizes, and its dtype, which casts of the model change."""

    shape: torch.Size
    width: int
    group: int
    dim: int
    dtype: torch.dtype


def codes_of(layer: nn.Module, name: str = "weight") -> WeightCodes:
    """The coded parameter: [outputs, inputs], or the rows of a table. Of several experts the outputs of all.

    Raises:
        UsageError: the layer is not quantized.
    """
    state = _states(layer).get(name)
    if state is None:
        msg = f"{name} of {type(layer).__name__} is not quantized"
        raise UsageError(msg)
    found: dict[str, Any] = layer._buffers
    codes, scales, offsets = (found[name + end] for end in (CODES, SCALES, OFFSETS))
    return WeightCodes(codes, scales, offsets, state.width, state.group, state.dim)


def _states(layer: nn.Module) -> dict[str, _State]:
    """Name of each coded parameter -> its facts."""
    found: dict[str, _State] = layer.__dict__.get(_STATE, {})
    return found


def coded_buffers(layer: nn.Module) -> list[str]:
    """Names of the buffers that stand for parameters."""
    names = [name + end for name in _states(layer) for end in (CODES, SCALES, OFFSETS)]
    return [name for name in names if layer._buffers[name] is not None]


def is_quantized(layer: nn.Module) -> bool:
    """True if the weights of the layer are coded."""
    return bool(_states(layer))


def dequantized(layer: nn.Module, dtype: torch.dtype = torch.float32, name: str = "weight") -> Tensor:
    """A new tensor with the parameter, in its original layout. Shapes: as the parameter had."""
    weight = codes_of(layer, name)
    out = torch.empty(weight.rows, weight.width, dtype=dtype, device=weight.codes.device)
    weight_codes.dequantize(out, weight, threads=torch.get_num_threads())
    return out.t() if is_transposed(layer) else out.view(_states(layer)[name].shape)


def apply_to_coded(layer: nn.Module, kind: type[nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """`nn.Module._apply` under which scales and offsets keep their dtype."""
    states = _states(layer)
    buffers: dict[str, Any] = layer._buffers
    ends = (name + end for name in states for end in (SCALES, OFFSETS))
    with uncast(buffers, (name for name in ends if buffers[name] is not None)):
        kind._apply(layer, fn, recurse)
        for name, state in states.items():
            state.dtype = fn(torch.empty(0, dtype=state.dtype, device=buffers[name + CODES].device)).dtype
    return layer


class QuantizedLinear(nn.Linear):
    """`nn.Linear` with a coded weight.

    Shapes: as `nn.Linear`; results have the dtype of the input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The product, plus the bias."""
        return weight_codes.linear(x, codes_of(self), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, nn.Linear, fn, recurse)


class QuantizedConv1D(nn.Module):
    """transformers' `Conv1D`, a linear layer with the weight [inputs, outputs], with a coded weight.

    Attributes:
        nx: inputs.
        nf: outputs.
    """

    bias: Tensor | None
    nx: int
    nf: int

    def forward(self, x: Tensor) -> Tensor:
        """The product, plus the bias."""
        return weight_codes.linear(x, codes_of(self), self.bias)

    def extra_repr(self) -> str:
        """Widths."""
        return f"nf={self.nf}, nx={self.nx}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, nn.Module, fn, recurse)


class QuantizedEmbedding(nn.Embedding):
    """`nn.Embedding` with a coded table; rows have the dtype that the table had, or was cast to."""

    def forward(self, index: Tensor) -> Tensor:
        """The rows."""
        return _rows_of(self, index)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, nn.Embedding, fn, recurse)


def _product(
    layer: nn.Module, x: Tensor, weight: None, bias: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    """What sliced layers multiply by. The codes are [outputs, inputs] in any case."""
    return weight_codes.linear(x, codes_of(layer), bias)


class QuantizedColumnLinear(ColumnLinear):
    """`ColumnLinear` with a coded weight."""

    product = _product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, ColumnLinear, fn, recurse)


class QuantizedRowLinear(RowLinear):
    """`RowLinear` with a coded weight."""

    product = _product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, RowLinear, fn, recurse)


class QuantizedVocabLinear(VocabLinear):
    """`VocabLinear` with a coded weight."""

    product = _product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, VocabLinear, fn, recurse)


class QuantizedVocabEmbedding(VocabEmbedding):
    """`VocabEmbedding` with a coded table."""

    def rows_of(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of this rank's part of the table."""
        return _rows_of(self, index)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, VocabEmbedding, fn, recurse)


def _rows_of(layer: nn.Module, index: Tensor) -> Tensor:
    """Rows of a coded table. Shapes: index [...], result [..., width]."""
    weight, flat = codes_of(layer), index.reshape(-1)
    out = torch.empty(flat.numel(), weight.width, dtype=_states(layer)["weight"].dtype, device=weight.codes.device)
    weight_codes.dequantize(out, weight.pick(flat))
    return out.view(*index.shape, weight.width)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: QuantizedLinear,
    nn.Embedding: QuantizedEmbedding,
    ColumnLinear: QuantizedColumnLinear,
    RowLinear: QuantizedRowLinear,
    VocabLinear: QuantizedVocabLinear,
    VocabEmbedding: QuantizedVocabEmbedding,
}


def quantized_class(layer: nn.Module) -> type[nn.Module] | None:
    """The class of the layer once it is quantized; None for other modules, and subclasses with their own forward."""
    kind = type(layer)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return QuantizedConv1D
    return _CLASSES.get(kind)


def is_table(layer: nn.Module) -> bool:
    """True for embeddings."""
    return isinstance(layer, (nn.Embedding, VocabEmbedding))


def is_transposed(layer: nn.Module) -> bool:
    """True if the weight is [inputs, outputs]."""
    is_conv = isinstance(layer, QuantizedConv1D) or quantized_class(layer) is QuantizedConv1D
    return is_conv or bool(getattr(layer, "transposed", False))


def reason_to_keep(layer: nn.Module) -> str:
    """Why a layer that could be quantized keeps its weight; "" if nothing speaks against it."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return "its weight is no matrix of floats"
    if type(weight) not in (Tensor, nn.Parameter):  # such as those of torchao
        return f"its weight is of the kind {type(weight).__name__}, of another library"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "it renormalises its rows"
    return ""


def quantize_module(module: nn.Module, how: Format, name: str = "") -> nn.Module:
    """Code the weight of a layer, in place; returns the layer. Its parameter is free for collection afterwards.

    Args:
        module: `nn.Linear`, `nn.Embedding`, transformers' `Conv1D`, or a layer of `mpispeed.nn.tensor`; may be on meta.
        how: the codes.
        name: of the layer, for errors.

    Raises:
        UsageError: there is no quantized form of the layer, or its weight is no matrix of floats.
        ConfigError: the groups do not divide the size.
    """
    kind, label = quantized_class(module), name or type(module).__name__
    if kind is None or (why := reason_to_keep(module)):
        msg = f"{label} cannot be quantized: {'there is no such form' if kind is None else why}"
        raise UsageError(msg)
    weight: Any = module._parameters["weight"]
    values = weight.detach().t() if is_transposed(module) else weight.detach()
    dim = 1 if how.is_along_inputs else 0
    check_groups(label, values.shape[dim], how)
    coded = weight_codes.encode(values, how.bits, how.group, dim=dim, is_symmetric=how.is_symmetric)
    adopt(module, "weight", coded, weight)
    module.__class__ = kind
    return module


def check_groups(label: str, size: int, how: Format) -> None:
    """Refuse a size that is no multiple of the groups, if it has to be one.

    Raises:
        ConfigError: it is none.
    """
    if how.is_exact and size % how.group:
        what = "inputs" if how.is_along_inputs else "outputs"
        msg = f"{label}: groups of {how.group} do not divide {size} {what}; choose a divisor of it as group_size"
        raise ConfigError(msg)


def adopt(module: nn.Module, name: str, coded: WeightCodes, param: Tensor) -> None:
    """Give `module` codes for its parameter, which becomes None."""
    module.register_parameter(name, None)
    for end, buffer in ((CODES, coded.codes), (SCALES, coded.scales), (OFFSETS, coded.offsets)):
        module.register_buffer(name + end, buffer)
    state = _State(param.shape, coded.width, coded.group, coded.dim, param.dtype)
    module.__dict__.setdefault(_STATE, {})[name] = state


def share(module: nn.Module, first: nn.Module) -> None:
    """Give `module`, whose weight was that of the quantized layer `first`, its codes."""
    kind = quantized_class(module)
    if kind is None:
        msg = f"{type(module).__name__} cannot share codes"
        raise UsageError(msg)
    weight: Any = module._parameters["weight"]
    adopt(module, "weight", codes_of(first), weight)
    module.__class__ = kind
