"""Products of few rows with a weight on the host, as in decoding: y = x w^T + bias, with the weight read once.

Each output is a sum in sixteen fp32 lanes along the inputs, joined in a fixed order and rounded once: the bits of a row
depend neither on the other rows of the call, nor on threads, nor on the vector width, and are those of the reference.

torch's own product is faster where rows are many; `MOST_ROWS` is from one kind of processor, an AMD EPYC with AVX-512
(benchmarks/inference/kernels.py measures it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpispeed.native import status
from mpispeed.native.cuda import ops

KINDS = {torch.float32: 1, torch.bfloat16: 2}
"""Dtypes with a loop. With fp16, torch's product of one row is the faster one."""

MOST_ROWS = {torch.float32: 64, torch.bfloat16: 2}
"""Rows up to which the loop is the faster one, or up to which it was measured."""

_LANES = 16
_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """True if loops may take the addresses of all tensors: no subclasses, gradients, traces or autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    is_recording = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or not x.is_cpu or (is_recording and x.requires_grad)):
            return False
    return True


def fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if `thin_linear` takes these tensors, and is faster than torch."""
    most = MOST_ROWS.get(x.dtype, 0)
    outputs, inputs = weight.shape
    return (
        0 < x.numel() <= most * inputs
        and x.dtype == weight.dtype
        and outputs > 0
        and weight.is_contiguous()
        and is_plain(x, weight, bias)
        and status.found("layer_loops") is not None
    )


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, threads: int | None = None) -> Tensor:
    """Apply a linear layer to few rows.

    Shapes: x [..., n], weight [m, n], bias [m]; the result is [..., m].

    Args:
        x: fp32 or bf16 on the host, without a gradient; so are the others.
        weight: contiguous.
        bias: is added before the sum is rounded.
        threads: None: those of torch.

    Raises:
        ValueError: shapes, layouts or threads do not fit.
        TypeError: dtypes do not fit.
    """
    _check(x, weight, bias)
    threads = torch.get_num_threads() if threads is None else threads
    status.check_threads("thin_linear", threads)
    if torch._C._len_torch_dispatch_stack():  # somebody counts or traces what is computed
        seen: Tensor = _thin.op(x, weight, bias, threads)
        return seen
    return _run(x, weight, bias, threads)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    module = status.compiled("layer_loops")
    if module is None:
        return thin_linear_reference(x, weight, bias)
    x = x.contiguous()
    outputs, inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], outputs))
    address = 0 if bias is None else bias.data_ptr()
    rows, kind = x.numel() // max(inputs, 1), KINDS[x.dtype]
    module.thin(out.data_ptr(), x.data_ptr(), weight.data_ptr(), address, rows, outputs, inputs, kind, threads)
    return out


_thin = ops.define(
    "thin_linear(Tensor x, Tensor weight, Tensor? bias, int threads) -> Tensor",
    _run,
    lambda x, weight, bias, threads: x.new_empty((*x.shape[:-1], weight.shape[0])),
)


@torch.no_grad()
def thin_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `thin_linear`, in torch, with the same bits."""
    inputs = weight.shape[1]
    pad = (0, -inputs % _LANES)
    rows = torch.nn.functional.pad(x.float().reshape(-1, inputs), pad)
    columns = torch.nn.functional.pad(weight.float(), pad)
    lanes = torch.zeros(rows.shape[0], columns.shape[0], _LANES)
    for begin in range(0, rows.shape[1], _LANES):
        lanes = lanes + columns[None, :, begin : begin + _LANES] * rows[:, None, begin : begin + _LANES]
    y = joined(lanes)
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def joined(lanes: Tensor) -> Tensor:
    """The sums of the last dim, of sixteen lanes, in the order of the compiled loops."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {bias if bias is None else tuple(bias.shape)}"
        msg = f"thin_linear of {shapes}; expected [..., n], [m, n] and [m]"
        raise ValueError(msg)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in KINDS or tensor.dtype != x.dtype:
            msg = f"thin_linear: {name} is {tensor.dtype}; all have to be fp32, or all bf16"
            raise TypeError(msg)
        if not tensor.is_cpu or (name != "x" and not tensor.is_contiguous()):
            msg = f"thin_linear: {name} is on {tensor.device} with strides {tensor.stride()}; "
            msg += "expected contiguous on the host"
            raise ValueError(msg)
