"""Catalog of kernels: source below cuda/, arguments, and whether spilled registers matter.

An argument format is one of Python's `struct` in native mode, as pycuda's `prepare` takes it: "P" a pointer, "Q" an
unsigned 64-bit and "i" a signed 32-bit integer, "I" an unsigned one, "f" fp32, "40s" a packed structure. A structure
stands after the pointers, because "s" aligns to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

TAGS: dict[torch.dtype, str] = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""How the name of a kernel says the dtype it works on."""

ARCHITECTURES = ("sm_80", "sm_90")
"""What continuous integration compiles for."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point.

    Attributes:
        name: of the function; unique over all files.
        source: file below cuda/.
        arguments: format of its arguments.
        is_hot: a spilled register is a failure of the build, not a note.
    """

    name: str
    source: str
    arguments: str
    is_hot: bool = False


def _each(source: str, arguments: str, names: Iterable[str], *, is_hot: bool = False) -> Iterator[tuple[str, Kernel]]:
    for name in names:
        yield name, Kernel(name, source, arguments, is_hot)


def _typed(*stems: str) -> list[str]:
    return [f"{stem}_{tag}" for stem in stems for tag in TAGS.values()]


def _low(stem: str, *, has_grad: bool = True) -> list[str]:
    """One name per 16-bit parameter (w), state (s) and gradient, which are fp32 or of the parameter's dtype."""
    names = [(w, f"{stem}_{w}w_{s}s") for w in ("bf16", "fp16") for s in ("f32", w)]
    return [f"{name}_{grad}" for w, name in names for grad in ("f32", w)] if has_grad else [name for _, name in names]


_ONEBIT = ("onebit_adam_f32", "zero_one_coded_f32", "zero_one_drift_f32", "zero_one_settle_f32")


def _copied(*stems: str) -> list[str]:
    """One name without and one for each dtype of a 16-bit copy."""
    return [f"{stem}{out}" for stem in stems for out in ("", "_bf16", "_fp16")]


def _multi(stem: str) -> list[str]:
    """One name per dtype of the gradient and of the 16-bit copy, if there is one; and those for 16-bit parameters."""
    return [*_copied(*_typed(stem)), *_low(stem)]


def _softmax(stem: str, arguments: str) -> Iterator[tuple[str, Kernel]]:
    """Groups of threads per row: lanes with 8 or 16 elements, a block, or a walking block; for each width of access."""
    wide, single = ("16", "block", "long"), ("single_8", "single_block", "single_long")
    for name, teams in {"": wide, "_single": single, "_drop": wide, "_drop_single": single}.items():
        drops = "drop_" if "drop" in name else ""
        names = _typed(*(f"{stem}_{drops}{team}" for team in teams))
        if "16" in teams:
            names.append(f"{stem}_{drops}8_f32")
        yield from _each(f"softmax/{stem}{name}.cu", arguments, names, is_hot=True)


# fmt: off
KERNELS: dict[str, Kernel] = dict([
    *_each("optim/multi_tensor_adam.cu", "PPP72s", _multi("adam"), is_hot=True),
    *_each("optim/multi_tensor_adagrad.cu", "PPP72s", _multi("adagrad"), is_hot=True),
    *_each("optim/multi_tensor_lion.cu", "PPP72s", _multi("lion"), is_hot=True),
    *_each("optim/multi_tensor_lamb.cu", "PPPP72s", [*_typed("lamb_moments"), *_low("lamb_moments")], is_hot=True),
    *_each("optim/multi_tensor_lamb.cu", "PPP72s", ["lamb_ratios"]),
    *_each("optim/multi_tensor_lamb.cu", "PPP72s", ["lamb_apply", "lamb_apply_bf16", "lamb_apply_fp16"], is_hot=True),
    *_each("optim/multi_tensor_lamb.cu", "PPP72s", _low("lamb_apply", has_grad=False), is_hot=True),
    *_each("optim/multi_tensor_onebit.cu", "PPP72s", _copied(*_ONEBIT), is_hot=True),
    *_each("optim/multi_tensor_onebit.cu", "PPP72s", _typed("zero_one_local_f32"), is_hot=True),
    *_each("optim/global_norm.cu", "PPP", _typed("square_sum"), is_hot=True),
    *_each("optim/global_norm.cu", "PPPQ", ["square_sum_total"]),
    *_each("optim/exact_squares.cu", "PPQ", _typed("exact_squares"), is_hot=True),
    *_each("optim/exact_squares.cu", "PPP16s", ["norm_and_factor"]),
    *_softmax("softmax", "PPPP96s"),
    *_softmax("softmax_grad", "PPP96s"),
    *_each("softmax/dropout.cu", "PPQQIfI", _typed("dropout"), is_hot=True),
    *_each("quant/block_encode.cu", "PPPPP48s", _typed(*(f"block_quantize{b}{e}"
           for b in (8, 4) for e in ("", "_error"))), is_hot=True),
    *_each("quant/block_encode.cu", "PPPP48s2056s", (f"block_requantize{a}_{b}{e}"
           for a in (8, 4) for b in (8, 4) for e in ("", "_error")), is_hot=True),
    *_each("quant/block_decode.cu", "P48s2056s", _typed(*(f"block_dequantize{b}{e}"
           for b in (8, 4) for e in ("", "_add"))), is_hot=True),
    *_each("norm/norm.cu", "PPPPPPPP24s", _typed("layer_norm_kept", "rms_norm_kept"), is_hot=True),
    *_each("norm/norm.cu", "PPPPPPPP24s", _typed("layer_norm_any", "rms_norm_any")),
    *_each("norm/norm.cu", "PPPPPPPPP24s24s", _typed("drop_layer_norm_kept"), is_hot=True),
    *_each("norm/norm.cu", "PPPPPPPPP24s24s", _typed("drop_layer_norm_any")),
    *_each("norm/norm_backward.cu", "PPPPPPPPP24s", _typed(*(f"{n}_norm_backward_{width}"
           for n in ("layer", "rms") for width in (8, 16))), is_hot=True),
    *_each("norm/norm_backward.cu", "PPPPPPP24s", _typed("layer_norm_backward_any", "rms_norm_backward_any")),
    *_each("norm/norm_backward.cu", "PPPPPP24s", _typed("layer_norm_columns", "rms_norm_columns")),
    *_each("norm/column_sum.cu", "PPPQQ", _typed("column_sum")),
    *_each("bits/sign_pack.cu", "PPPP16s", (f"sign_mix_{x}{grad}" for x in TAGS.values()
           for grad in ("", "_f32", "_bf16", "_fp16")), is_hot=True),
    *_each("bits/sign_pack.cu", "PP3088s", ["sign_sum"], is_hot=True),
    *_each("bits/sign_pack.cu", "PP16s", ["sign_encode", *_typed("sign_decode")], is_hot=True),
    *_each("bits/state_codes.cu", "PPP32s", (f"state_encode8_{kind}{drawn}"
           for kind in ("signed", "unsigned") for drawn in ("", "_drawn")), is_hot=True),
    *_each("bits/state_codes.cu", "PPPQ", ["state_decode8_signed", "state_decode8_unsigned"], is_hot=True),
    *_each("bits/state_codes.cu", "PP32s", ["state_round_bf16", "state_round_fp16"], is_hot=True),
    *_each("bits/state_codes.cu", "PPPQ", (f"state_{what}_{tag}"
           for what in ("split", "join") for tag in ("bf16", "fp16")), is_hot=True),
    *_each("transformer/bias_gelu.cu", "PPP24s", _typed("gelu_tanh", "gelu_exact"), is_hot=True),
    *_each("transformer/bias_gelu.cu", "PPPPP24s", _typed("gelu_tanh_grad", "gelu_exact_grad"), is_hot=True),
    *_each("transformer/bias_dropout_residual.cu", "PPPP56s", _typed("bias_dropout_residual"), is_hot=True),
    *_each("transformer/bias_dropout_residual.cu", "PPP56s", _typed("bias_dropout_residual_grad"), is_hot=True),
    *_each("token_drop/token_drop.cu", "PPP48s", (f"token_gather_{width}_{index}"
           for width in (16, 8, 4, 2, 1) for index in ("i32", "i64")), is_hot=True),
    *_each("token_drop/token_drop.cu", "PPPP48s", (f"token_merge_{width}" for width in (16, 8, 4, 2, 1)), is_hot=True),
    *_each("token_drop/token_drop.cu", "PP48s", ["token_sources_i32", "token_sources_i64"]),
    *_each("rows/rows.cu", "PPPP32s", _typed("row_combine", "row_spread", "row_dot"), is_hot=True),
    *_each("rows/rows.cu", "PP32s", ["row_sources"]),
    *_each("sum/tree_sum.cu", "P80s", [*_typed("tree_sum"), "tree_sum_bf16_f32", "tree_sum_fp16_f32"], is_hot=True),
    *_each("transformer/split_qkv.cu", "PPPPPPP40s", _typed("split_qkv", "merge_qkv"), is_hot=True),
])
# fmt: on


def sources() -> list[str]:
    """Every file with kernels, in order."""
    return sorted({kernel.source for kernel in KERNELS.values()})


def of_source(source: str) -> list[Kernel]:
    """The kernels of one file."""
    return [kernel for kernel in KERNELS.values() if kernel.source == source]
