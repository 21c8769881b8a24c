"""Floating-point operations and multiply-accumulates of functions of torch, as DeepSpeed's profiler counts them.

Element-wise functions, pools and norms count by the elements of their input, `+` and `*` between tensors do not, and
nothing does in backward. So the numbers compare with those of DeepSpeed, not with what hardware does.

Some of its rules are kept although they are not exact: a transposed convolution has the bias of an ordinary one's
outputs, shapes of `add` and `mul` are aligned from the left, and recurrent layers count no multiply-accumulates.

Source: the documentation of DeepSpeed's flops profiler, and numbers that it printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpispeed.flops import formulas

Numbers = tuple[int, int]
"""Operations and multiply-accumulates."""

Formula = Callable[..., Numbers]
"""Takes the arguments of the function."""


def deepspeed_count(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Numbers | None:
    """Operations and multiply-accumulates of one call that a `TorchFunctionMode` sees; None if they are not counted.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its other arguments.
        out: its result.
    """
    del out
    formula = TABLE.get(func)
    return None if formula is None else formula(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any) -> Numbers:
    macs = input.numel() * weight.shape[0]
    return 2 * macs, macs


# -- convolutions ------------------------------------------------------------------------------------------------------


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _places(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> int:
    """Places of the output of a convolution, over all samples."""
    dims = weight.dim() - 2
    kernel, sizes, dilations = weight.shape[2:], input.shape[-dims:], _each(dilation, dims)
    if padding == "same":
        pads = tuple(d * (k - 1) // 2 for d, k in zip(dilations, kernel, strict=True))
    else:
        pads = (0,) * dims if padding == "valid" else _each(padding, dims)
    steps = zip(sizes, pads, dilations, kernel, _each(stride, dims), strict=True)
    return _samples(input, weight) * prod((i + 2 * p - d * (k - 1) - 1) // s + 1 for i, p, d, k, s in steps)


def _samples(input: Tensor, weight: Tensor) -> int:
    return int(input.shape[0]) if input.dim() == weight.dim() else 1


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Numbers:  # fmt: skip
    places = _places(input, weight, stride, padding, dilation)
    channels = input.shape[1 - weight.dim()]
    macs = prod(weight.shape[2:]) * channels * (weight.shape[0] // groups) * places
    return 2 * macs + (0 if bias is None else weight.shape[0] * places), macs


def _transposed(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Numbers:  # fmt: skip
    del output_padding
    samples, sizes = _samples(input, weight), input.shape[2 - weight.dim() :]
    macs = weight.numel() * samples * prod(sizes)
    places = _places(input, weight, stride, padding, dilation)
    return 2 * macs + (0 if bias is None else weight.shape[1] * groups * places), macs


# -- element-wise functions --------------------------------------------------------------------------------------------


def _elements(input: Tensor, *args: Any, **kwargs: Any) -> Numbers:
    return input.numel(), 0


def _norm(input: Tensor, affine: bool) -> Numbers:
    return input.numel() * (5 if affine else 4), 0


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0
) -> Numbers:
    return _norm(input, weight is not None)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0
) -> Numbers:
    return _norm(input, weight is not None)


def _instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None, *args: Any,
    **kwargs: Any,
) -> Numbers:  # fmt: skip
    return _norm(input, weight is not None)


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 0.0,
) -> Numbers:  # fmt: skip
    has_affine = weight is not None
    return _norm(input, has_affine) if training else (input.numel() * (2 if has_affine else 1), 0)


def _interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, *args: Any, **kwargs: Any) -> Numbers:
    """The places of the result; a factor that is one number is one for every dim."""
    if size is not None:
        return (int(size) if isinstance(size, int) else prod(size)), 0
    dims = input.dim() - 2
    factors = (scale_factor,) * dims if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
    return int(input.numel() * prod(factors)), 0


def _pairs(input: Any, other: Any, *, alpha: Any = 1, out: Any = None) -> Numbers:
    """Elements of a sum or a product, with dims aligned from the left."""
    shapes = (tuple(getattr(each, "shape", ())) for each in (input, other))
    return prod(max(sizes) for sizes in itertools.zip_longest(*shapes, fillvalue=1)), 0


# -- products ----------------------------------------------------------------------------------------------------------


def _product(input: Tensor, other: Any = None, *, mat2: Any = None, tensor2: Any = None, **kwargs: Any) -> Numbers:
    right = next(each for each in (other, mat2, tensor2) if each is not None)
    macs = input.numel() * right.shape[-1]
    return 2 * macs, macs


def _sum_and_product(input: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Numbers:
    macs = left.numel() * right.shape[-1]
    return 2 * macs + input.numel(), macs


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Numbers:
    return _sum_and_product(input, mat1, mat2)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *args: Any, **kwargs: Any) -> Numbers:
    return _sum_and_product(input, batch1, batch2)


def _einsum(equation: Any, *operands: Any) -> Numbers:
    """As numpy counts its best order of products; 0 for equations that are lists of dims."""
    if not isinstance(equation, str):
        return 0, 0
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    arrays = [np.broadcast_to(np.zeros(()), tuple(each.shape)) for each in operands]
    lines = str(np.einsum_path(equation.replace(" ", ""), *arrays, optimize="optimal")[1]).lower().splitlines()
    told = next((line for line in lines if "optimized flop" in line), ":0")
    return int(float(told.rpartition(":")[2])), 0


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Numbers:
    macs = query.numel() * key.shape[-2] + query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1]
    return 2 * macs, macs


# -- recurrent layers --------------------------------------------------------------------------------------------------


def _gates(weights: Sequence[Tensor], hidden: int, per_unit: int) -> int:
    """Of one layer and one token: products of the two matrices, biases, and the rest for each unit."""
    matrices = sum(2 * weight.numel() - weight.shape[0] for weight in weights[:2])
    return matrices + sum(bias.numel() for bias in weights[2:4]) + hidden * per_unit


def _layers(per_unit: int) -> Formula:
    def formula(input: Tensor, second: Any, third: Any, fourth: Any, *args: Any) -> Numbers:
        is_packed = isinstance(fourth, (list, tuple))  # data, sizes of batches, state, weights
        weights, has_bias, layers = (fourth, args[0], args[1]) if is_packed else (third, fourth, args[0])
        is_bidirectional = args[4] if is_packed else args[3]
        kept = len(weights) // (layers * (2 if is_bidirectional else 1))
        step = kept * (2 if is_bidirectional else 1)
        hidden = weights[1].shape[1] if kept != (5 if has_bias else 3) else weights[1].shape[0] // 4
        total = 0
        for layer in range(layers):
            own = weights[layer * step : layer * step + (4 if has_bias else 2)]
            total += _gates(own, hidden, per_unit)
        tokens = prod(input.shape[:-1])
        return total * tokens * (2 if is_bidirectional else 1), 0

    return formula


def _cell(per_unit: int) -> Formula:
    def formula(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Numbers:
        weights = [w_ih, w_hh, *(bias for bias in (b_ih, b_hh) if bias is not None)]
        return _gates(weights, w_hh.shape[1], per_unit) * prod(input.shape[:-1]), 0

    return formula


# -- our own operators -------------------------------------------------------------------------------------------------


def _plus(first: Numbers, second: Numbers) -> Numbers:
    return first[0] + second[0], first[1] + second[1]


def _gelu_linear(x: Tensor, bias: Tensor, weight: Tensor) -> Numbers:
    return _plus(_elements(x), _linear(x, weight))


def _grouped(*args: Any) -> Numbers:
    """Products of experts: DeepSpeed's profiler knew them as one linear layer for each."""
    operations = formulas.grouped(args)
    return operations, operations // 2


def _multiply_codes(out: Tensor, x: Tensor, *args: Any) -> Numbers:
    macs = x.numel() * out.shape[-1]
    return 2 * macs, macs


def _own_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Numbers:
    """Two products, and a softmax between them."""
    return _plus(_attention(q, k, v), (q.numel() // q.shape[-1] * k.shape[-2], 0))


def _attend(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Numbers:
    macs = 2 * q.numel() * k.shape[-2]
    return 2 * macs, macs


def _own_norm(x: Tensor, residual: Any, weight: Tensor | None, *args: Any) -> Numbers:
    return _norm(x, weight is not None)


def _drop_norm(x: Tensor, x_bias: Any, residual: Any, weight: Tensor | None, *args: Any) -> Numbers:
    return _norm(x, weight is not None)


_PER_UNIT = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 7, "lstm": 10}

_POOLS = [
    getattr(F, f"{kind}_pool{dims}d{suffix}")
    for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
    for dims in (1, 2, 3)
    for suffix in ("", "_with_indices")
    if hasattr(F, f"{kind}_pool{dims}d{suffix}")
]

TABLE: dict[Any, Formula] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    **dict.fromkeys((F.relu, F.prelu, F.elu, F.leaky_relu, F.relu6, F.silu, F.gelu, F.softmax), _elements),
    **dict.fromkeys(_POOLS, _elements),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
    F.interpolate: _interpolate,
    F.upsample: _interpolate,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _product),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm), _product),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    **dict.fromkeys((torch.add, torch.mul, Tensor.add, Tensor.mul), _pairs),
    torch.functional.einsum: _einsum,
    F.scaled_dot_product_attention: _attention,
    **{getattr(torch, name): _layers(per_unit) for name, per_unit in _PER_UNIT.items()},
    **{getattr(torch, f"{name}_cell"): _cell(per_unit) for name, per_unit in _PER_UNIT.items()},
}
"""By function, as a function mode sees it; operators are methods of tensors there."""

OPERATORS: dict[str, Formula] = {
    "flex_attention": _attention,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "mpispeed::thin_linear": _linear,
    "mpispeed::multiply_codes": _multiply_codes,
    "mpispeed::attend": _attend,
    "mpispeed::attention": _own_attention,
    "mpispeed::gelu_linear": _gelu_linear,
    "mpispeed::bias_gelu": _elements,
    "mpispeed::masked_softmax": _elements,
    "mpispeed::norm": _own_norm,
    "mpispeed::drop_norm": _drop_norm,
}
"""By name, as a dispatch mode sees them: operators of ours, experts and attention, by the functions they stand for."""
