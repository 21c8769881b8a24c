"""Floating-point operations of one call of an operator, from the shapes of its tensors.

A multiplication and an addition are two. Products of matrices, convolutions, attention and recurrent layers count;
element-wise work, sums, norms and copies are zero. Additions of a bias are left out, as torch's counter does.

Attention counts as its two matrix products, whatever computes it: with masks and causal ones too, and for every head of
the queries where keys are shared. Its backward pass counts as four, although fused kernels compute the scores again.
Recurrent layers and experts count as the products they are written as.

Sources: `torch.utils.flop_counter` has the formulas of products, convolutions and attention over packed sequences;
Shoeybi et al., "Megatron-LM", 2019, and Korthikanti et al., arXiv 2205.05198, appendix A, those of attention.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], int]
"""Takes positional arguments, keywords and the result of a call."""


def count(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """Operations of one call that a `TorchDispatchMode` sees; None if `func` has no formula.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its other arguments.
        out: its result.

    Raises:
        AttributeError, IndexError, TypeError, ValueError, RuntimeError: tensors have no shapes that fit the formula.
    """
    formula = formula_of(func)
    return None if formula is None else formula(args, kwargs, out)


def formula_of(func: Any) -> Formula | None:
    """The formula of an operator, or None."""
    return _FORMULAS.get(name_of(func))


def name_of(func: Any) -> str:
    """Name of an operator with its namespace, the same for its overloads and its form that works in place."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return str(getattr(func, "_name", None) or getattr(func, "__name__", None) or func)
    name = str(schema.name)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@functools.cache
def is_free(func: Any) -> bool:
    """True for an operator without a formula that is known to have no products: element-wise, a sum, a copy, a view.

    What multiplies matrices has names that tell; other libraries' operators are never known.
    """
    name = name_of(func)
    namespace, _, base = name.partition("::")
    if namespace in ("prim", "prims", "c10d", "_c10d_functional", "profiler", "debugprims") or name in _OWN_FREE:
        return True
    if namespace != "aten":
        return False
    tags = getattr(func, "tags", ())
    is_light = torch.Tag.pointwise in tags or getattr(func, "is_view", False) or base in _LIGHT
    return bool(is_light) or _PRODUCT_NAME.search(base) is None


_PRODUCT_NAME = re.compile(
    r"(^|_|add|b|sp)mm(_|$)|mv$|matmul|linear|conv(?!ert)|attention|attn|rnn|lstm|gru|linalg|fft_[cr]|(_|c|p)dist(_|$)|solve"
    r"|cholesky|^lu_|(^|_)qr|geqrf|ormqr|svd|(^|_)eig|inverse|matrix|householder|einsum|tensordot|kron|triton"
)
_LIGHT = frozenset(
    {
        *(f"upsample_{form}{end}" for form in ("linear1d", "bilinear2d", "trilinear3d") for end in ("", "_backward")),
        "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward", "linspace",
        "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward",
        "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_cudnn_rnn_flatten_weight",
        "_convert_weight_to_int4pack", "_convert_weight_to_int4pack_for_cpu", "_dyn_quant_pack_4bit_weight",
        "mkldnn_reorder_conv2d_weight", "mkldnn_reorder_conv3d_weight", "linalg_vector_norm", "linalg_cross",
        "linalg__powsum", "_linalg_check_errors",
    }
)  # fmt: skip
"""Operators of torch with a name of products, and none."""

_OWN_FREE = frozenset(
    {
        *(f"mpispeed::{name}{end}"
          for name in ("norm", "masked_softmax", "bias_gelu", "bias_dropout_residual", "drop_norm")
          for end in ("", "_backward")),
        "mpispeed::row_spread", "mpispeed::row_combine", "mpispeed::row_dot", "mpispeed::split_qkv",
        "mpispeed::merge_qkv", "mpispeed::token_gather", "mpispeed::token_merge",
    }
)  # fmt: skip


# -- products ----------------------------------------------------------------------------------------------------------


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def _elements(x: Tensor) -> int:
    """Elements that are stored."""
    return int(x._nnz() if x.layout in _SPARSE else x.numel())


def _product(left: int) -> Formula:
    """Of matrices whose left one is argument number `left`: all its elements, for every column of the result."""

    def formula(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        del kwargs
        return 2 * _elements(args[left]) * int(out.shape[-1])

    return formula


def _vector(matrix: int) -> Formula:
    """Of a matrix, or a vector, with a vector."""
    return lambda args, kwargs, out: 2 * args[matrix].numel()


def grouped(args: Sequence[Any], ends: int = 2, offsets: Any = None) -> int:
    """Groups of rows or columns, each with a matrix of its own; rows behind the last group are nobody's.

    Args:
        args: of the call.
        ends: number of the argument with the ends of groups. On a device they are not waited for: there all rows count.
        offsets: the ends, if they are not among `args`.
    """
    (a, b), offsets = args[:2], args[ends] if len(args) > ends else offsets
    sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
    if offsets is not None and offsets.is_cpu and offsets.numel() and type(offsets) is Tensor:
        cut = 1 if a.dim() == b.dim() else 0 if a.dim() < b.dim() else 2
        sizes[cut] = min(sizes[cut], int(offsets[-1]))
    is_batch = a.dim() == b.dim() == 3
    return int(2 * prod(sizes) * (a.shape[0] if is_batch else 1))


def _grouped(ends: int, times: int = 1) -> Formula:
    return lambda args, kwargs, out: times * grouped(args, ends, kwargs.get("offs"))


def _linear_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    _, grad, weight, mask = args
    return 2 * grad.numel() * weight.shape[1] * (bool(mask[0]) + bool(mask[1]))


def _trilinear(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Two products, one after the other: what the third tensor lacks is summed in the first one."""
    del kwargs, out
    expands, sums = args[3:6], args[6]
    first, second, third = (list(tensor.shape) for tensor in args[:3])
    for sizes, dims in zip((first, second, third), expands, strict=True):
        for dim in sorted(dims):
            sizes.insert(dim, 1)
    both = [max(sizes) for sizes in zip(first, second, strict=True)]
    left = [1 if dim in sums and dim in expands[2] else size for dim, size in enumerate(both)]
    return 2 * (prod(both) + prod(max(sizes) for sizes in zip(left, third, strict=True)))


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Every weight for every place of the output."""
    del kwargs
    return int(2 * out.shape[0] * prod(out.shape[2:]) * args[1].numel())


def _any_convolution(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """As `_convolution`; every weight for every place of the input if argument 6 says that it is transposed."""
    return _convolution(args, kwargs, args[0] if args[6] else out)


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Gradients of input and of weight each take what the convolution itself did, in groups too."""
    (grad, x, weight), is_transposed, mask = args[:3], args[-4], args[-1]
    return _convolution((x, weight), kwargs, x if is_transposed else grad) * (bool(mask[0]) + bool(mask[1]))


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Scores and their product with the values.

    Shapes: q [..., heads, queries, size], k [..., key heads, keys, size], v [..., key heads, keys, value size].
    """
    return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention(first: int, times: int) -> Formula:
    """Of queries, keys and values from argument `first` on."""
    return lambda args, kwargs, out: times * attention(*args[first : first + 3])


def _packed(of: Any, places: Sequence[int], times: int) -> Formula:
    """Of sequences one behind the other: torch's formula of `of`, which takes the arguments at these places."""
    return lambda args, kwargs, out: times * int(flop_registry[of](*(args[at] for at in places), out_val=out))


def _lengths(x: Tensor) -> list[int]:
    """Lengths of sequences [batch, length, size], nested or not."""
    if x.is_nested:
        return [int(length) for length in x._nested_tensor_size()[:, 0]]
    return [x.shape[-2]] * prod(x.shape[:-2])


def _self_attention(x: Tensor, width: int, weights: Sequence[Tensor]) -> int:
    """Self-attention with its projections, and the products of an MLP behind it."""
    scores = sum(4 * length * length * width for length in _lengths(x))
    return scores + 2 * sum(_lengths(x)) * sum(weight.numel() for weight in weights)


def _encoder_layer(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    return _self_attention(args[0], args[1], [args[at] for at in (3, 5, 14, 16)])


def _multi_head(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    return _self_attention(args[0], args[3], [args[5], args[7]])


# -- recurrent layers --------------------------------------------------------------------------------------------------


def _layer_on_host(times: int) -> Formula:
    """One direction of one layer: both weights for every token."""

    def formula(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
        del kwargs, out
        tokens = args[0].numel() // max(args[0].shape[-1], 1)
        return 2 * times * tokens * (args[1].numel() + args[2].numel())

    return formula


def _layers_on_device(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """All layers: every matrix for every token."""
    tokens = args[0].numel() // max(args[0].shape[-1], 1)
    return 2 * tokens * sum(weight.numel() for weight in args[1] if weight.dim() > 1)


def _layers_on_device_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    mask = next((each for each in reversed(args) if isinstance(each, (list, tuple)) and len(each) == 4), (1, 1, 1, 1))
    return _layers_on_device(args, kwargs, out) * (1 + bool(mask[3]))


# -- our own operators -------------------------------------------------------------------------------------------------


def _attend(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """One query for each sequence. Shapes: [batch, heads, size], and [batch, key heads, keys, size] twice."""
    return int(4 * args[0].numel() * args[1].shape[2])


def _gelu_linear_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    grad, _, _, weight = args
    return 4 * grad.numel() * int(weight.shape[1])


_aten = torch.ops.aten
_FORMULAS: dict[str, Formula] = {
    **{
        f"aten::{name}": _product(left)
        for left, names in (
            (0, "mm bmm linear mkldnn_linear _int_mm _scaled_mm _scaled_mm_v2 _weight_int8pack_mm _weight_int4pack_mm "
                "_weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit _mixed_dtypes_linear"),
            (1, "addmm baddbmm addbmm _addmm_activation"),
        )
        for name in names.split()
    },
    **{f"quantized::{name}": _product(0) for name in ("linear", "linear_relu", "linear_dynamic")},
    "aten::mv": _vector(0),
    "aten::dot": _vector(0),
    "aten::vdot": _vector(0),
    "aten::addmv": _vector(1),
    "aten::_sparse_addmm": _product(1),
    "aten::_trilinear": _trilinear,
    "aten::linear_backward": _linear_backward,
    "aten::_grouped_mm": _grouped(2),
    "aten::_scaled_grouped_mm": _grouped(4),
    "transformers::grouped_mm_fallback": _grouped(2),
    "transformers::grouped_mm_fallback_backward": _grouped(2, 2),
    **{f"aten::{name}": _any_convolution for name in ("convolution", "_convolution", "convolution_overrideable")},
    **{f"aten::{name}": _convolution for name in ("cudnn_convolution", "mkldnn_convolution", "_slow_conv2d_forward")},
    "aten::convolution_backward": _convolution_backward,
    "aten::convolution_backward_overrideable": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{name}": _attention(0, 1)
        for name in (
            "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable", "attention_math_for_mps",
        )
    },
    **{
        f"aten::_scaled_dot_product_{name}_backward": _attention(1, 2)
        for name in (
            "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    "aten::_flash_attention_forward": _packed(_aten._flash_attention_forward, range(7), 1),
    "aten::_flash_attention_backward": _packed(_aten._flash_attention_forward, (1, 2, 3, 6, 7, 8, 9), 2),
    "aten::_efficient_attention_forward": _packed(_aten._efficient_attention_forward, range(8), 1),
    "aten::_efficient_attention_backward": _packed(_aten._efficient_attention_forward, (1, 2, 3, 4, 6, 7, 8, 9), 2),
    "flex_attention": _attention(0, 1),
    "flex_attention_backward": _attention(0, 2),
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _multi_head,
    "aten::mkldnn_rnn_layer": _layer_on_host(1),
    "aten::mkldnn_rnn_layer_backward": _layer_on_host(2),
    "aten::_cudnn_rnn": _layers_on_device,
    "aten::_cudnn_rnn_backward": _layers_on_device_backward,
    "aten::miopen_rnn": _layers_on_device,
    "aten::miopen_rnn_backward": _layers_on_device_backward,
    "mpispeed::thin_linear": _product(0),
    "mpispeed::multiply_codes": lambda args, kwargs, out: 2 * args[1].numel() * args[0].shape[-1],
    "mpispeed::attend": _attend,
    "mpispeed::gelu_linear": _product(0),
    "mpispeed::gelu_linear_backward": _gelu_linear_backward,
    "mpispeed::attention": _attention(0, 1),
    "mpispeed::attention_backward": _attention(1, 2),
}  # fmt: skip
