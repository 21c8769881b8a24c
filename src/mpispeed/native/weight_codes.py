"""Matrices as 8- or 4-bit codes with a scale, and maybe an offset, for each group of neighbours; products with them.

An element is code * scale + offset. Without offsets the codes are those of `block_quant`: symmetric, with 127 or 7
levels on each side. With them they span the values of their group from the least to the greatest.

A product with few rows reads the codes once and never writes the matrix (`multiply`, in a compiled loop); with many
rows it writes a few rows of the matrix at a time to a buffer that stays in cache, and leaves the sums to torch.

Source: weight-only quantization in groups, e.g. ZeroQuant (arXiv 2206.01861) and GPTQ (arXiv 2210.17323).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mpispeed.native import block_quant, status
from mpispeed.native.codes import BLOCK_MOST, BLOCK_UNIT, CODE_DTYPES, LEVELS, Coded, Grid
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.flat import KINDS, REFERENCE_SPAN
from mpispeed.native.status import check_threads

FEW_ROWS = {torch.float32: 16, torch.bfloat16: 8, torch.float16: 8}
"""Rows of x up to which a product reads the codes directly: with more, torch's products of its dtype are faster."""

PANEL = 1 << 21
"""Elements of the matrix that are written at a time for a product with more rows: they stay in a shared cache."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_SCALE = 2.0**-126
_LANE, _RUN = 16, 8  # as in weight_loops.h: elements of a step, steps of a run


class WeightCodes(NamedTuple):
    """A coded matrix [rows, width].

    Shapes:
        codes: [rows, width] in int8, or [rows, ceil(width / 2)] in uint8 with the low nibble first
        scales: [rows, ceil(width / group)] in fp32; with `dim` 0 [ceil(rows / group), width]
        offsets: as scales, or None
        group: elements that share a scale, along `dim`; the last group may be short. Of 4 bits it is even if `dim` is
            1, unless it is the whole row.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    width: int
    group: int
    dim: int = 1

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 8 if self.codes.dtype == torch.int8 else 4

    def part(self, first: int, last: int) -> WeightCodes:
        """Rows [first, last), as views; with `dim` 0 they begin at a group."""
        place = slice(first, last) if self.dim else slice(first // self.group, -(-last // self.group))
        offsets = None if self.offsets is None else self.offsets[place]
        return self._replace(codes=self.codes[first:last], scales=self.scales[place], offsets=offsets)

    def pick(self, index: Tensor) -> WeightCodes:
        """Copies of the rows that `index` [n] names."""
        place = index if self.dim else index // self.group
        offsets = None if self.offsets is None else self.offsets[place]
        group = self.group if self.dim else 1
        return self._replace(codes=self.codes[index], scales=self.scales[place], offsets=offsets, group=group)


# -- encoding --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode(weight: Tensor, bits: int, group: int, *, dim: int = 1, is_symmetric: bool = True) -> WeightCodes:
    """The codes of a matrix. Temporaries are small.

    Args:
        weight: [rows, width] of any float dtype and layout.
        bits: 8 or 4.
        group: elements along `dim` that share a scale.
        dim: 1: groups are neighbours in a row; 0: in a column.
        is_symmetric: no offsets.

    Raises:
        ValueError: a number is out of range.
    """
    _check_format("encode", weight, bits, group, dim)
    rows, width = weight.shape
    made = _empty(weight, bits, group, dim, is_symmetric=is_symmetric)
    if weight.is_meta:
        return made
    step = max(1, REFERENCE_SPAN // max(1, width))
    step = step if dim else -(-step // group) * group
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part, values = made.part(first, last), weight[first:last].float()
        codes, scales, offsets = _encode_groups(values if dim else values.t(), bits, group, is_symmetric)
        part.codes.copy_(_pack(codes if dim else codes.t(), bits))
        part.scales.copy_(scales if dim else scales.t())
        if part.offsets is not None and offsets is not None:
            part.offsets.copy_(offsets if dim else offsets.t())
    return made


def shapes(rows: int, width: int, bits: int, group: int, dim: int = 1) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the codes and of the scales of a matrix [rows, width]."""
    codes = (rows, width if bits == 8 else -(-width // 2))
    return codes, (rows, -(-width // group)) if dim else (-(-rows // group), width)


def _empty(weight: Tensor, bits: int, group: int, dim: int, *, is_symmetric: bool) -> WeightCodes:
    codes, scales = shapes(weight.shape[0], weight.shape[1], bits, group, dim)
    of_scales = torch.empty(scales, device=weight.device)
    return WeightCodes(
        torch.empty(codes, dtype=CODE_DTYPES[bits], device=weight.device),
        of_scales, None if is_symmetric else torch.empty_like(of_scales), weight.shape[1], group, dim,
    )  # fmt: skip


def _check_format(where: str, weight: Tensor, bits: int, group: int, dim: int) -> None:
    if bits not in LEVELS:
        msg = f"{where}: codes of {bits} bits; 8 and 4 are possible"
        raise ValueError(msg)
    if weight.dim() != 2 or not weight.is_floating_point():
        msg = f"{where}: the weight is {weight.dtype} of shape {tuple(weight.shape)}; pass a matrix of floats"
        raise ValueError(msg)
    if dim not in (0, 1) or group < 1 or (bits == 4 and dim == 1 and group % 2 and group < weight.shape[1]):
        msg = f"{where}: groups of {group} elements along dim {dim}; use dim 0 or 1, and even groups in rows of 4 bits"
        raise ValueError(msg)


def _encode_groups(x: Tensor, bits: int, group: int, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as floats [n, width], scales and offsets [n, groups] of groups along rows of x [n, width]."""
    n, width = x.shape
    missing = -width % group
    if missing:  # the last element again, so that neither the least nor the greatest value changes
        x = torch.cat((x, x[:, -1:].expand(n, missing)), dim=1)
    blocks = x.reshape(-1, group)
    if is_symmetric:
        codes, scales = block_quant.levels(blocks, bits)
        offsets = None
    else:
        codes, scales, offsets = _spread(blocks, bits)
    flat = codes.view(n, -1)[:, :width]
    return flat, scales.view(n, -1), None if offsets is None else offsets.view(n, -1)


def _spread(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from the least to the greatest value, scales and offsets. Groups that are not finite become NaN."""
    low, high, half = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True), 1 << (bits - 1)
    scales = (high - low) / (2 * half - 1)
    is_spread = scales >= _SMALLEST_SCALE
    codes = torch.round((blocks - low) / torch.where(is_spread, scales, 1.0)).clamp_(0, 2 * half - 1) - half
    codes, scales = torch.where(is_spread, codes, 0.0), torch.where(is_spread | ~scales.isfinite(), scales, 0.0)
    is_finite = scales.isfinite() & low.isfinite()
    offsets = torch.where(is_spread, low + half * scales, low).masked_fill(~is_finite, torch.nan)
    return torch.where(is_finite, codes, 0.0), scales.masked_fill(~is_finite, torch.nan), offsets


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.to(torch.int8)
    pairs = F.pad(codes.to(torch.int16) & 15, (0, codes.shape[1] % 2)).view(codes.shape[0], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


# -- values ----------------------------------------------------------------------------------------------------------


def dequantize(out: Tensor, weight: WeightCodes, *, threads: int = 1) -> None:
    """Fill `out` [rows, width] (fp32, bf16 or fp16; contiguous, beside the codes) with the elements, rounded once.

    Raises:
        ValueError: layouts, shapes, devices or threads do not fit.
    """
    _check("dequantize", weight, threads, {"out": (out, (weight.rows, weight.width))})
    if out.is_meta or not out.numel():
        return
    module = _host_loops(weight, out.dtype)
    if module is not None:
        module.expand(out.data_ptr(), KINDS[out.dtype], *_numbers(weight), threads)
    elif launcher.for_tensor(out) and is_block_code(weight) and out.dtype in _FLOATS:
        block_quant.dequantize(out.view(-1), *block_code(weight))
    else:
        dequantize_reference(out, weight)


@torch.no_grad()
def dequantize_reference(out: Tensor, weight: WeightCodes, *, threads: int = 1) -> None:
    """As `dequantize`, in torch, with the same bits; `threads` is accepted for symmetry."""
    _check("dequantize", weight, threads, {"out": (out, (weight.rows, weight.width))})
    step = max(1, REFERENCE_SPAN // max(1, weight.width))
    step = step if weight.dim else -(-step // weight.group) * weight.group
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        part = weight.part(first, last)
        values = _integers(part).float() * _spread_out(part.scales, part)
        out[first:last] = values if part.offsets is None else values + _spread_out(part.offsets, part)


def is_block_code(weight: WeightCodes) -> bool:
    """True if `block_quant` can read these codes."""
    is_long = weight.group % BLOCK_UNIT == 0 and weight.group <= BLOCK_MOST
    return weight.dim == 1 and weight.offsets is None and is_long


def block_code(weight: WeightCodes) -> tuple[Coded, Grid]:
    """The same codes for `block_quant`: a piece for each row."""
    return Coded(weight.codes.view(-1), weight.scales.view(-1)), Grid(weight.width, weight.group, weight.rows)


def _integers(weight: WeightCodes) -> Tensor:
    """Codes [rows, width]."""
    if weight.bits == 8:
        return weight.codes
    wide = weight.codes.to(torch.int16)
    pairs = torch.stack((((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8), dim=2)
    return pairs.view(weight.rows, -1)[:, : weight.width]


def _spread_out(scales: Tensor, weight: WeightCodes) -> Tensor:
    """One for each element."""
    size = weight.width if weight.dim else weight.rows
    return scales.repeat_interleave(weight.group, dim=weight.dim).narrow(weight.dim, 0, size)


# -- products --------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: WeightCodes, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a coded matrix; in fp32, rounded once, for up to `FEW_ROWS` rows of x on the host.

    If x needs a gradient, the whole matrix is dequantized; codes get none.

    Shapes: x [..., width], bias [rows], result [..., rows] in the dtype of x, or of autocast.

    Raises:
        ValueError: shapes or devices do not fit.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    _check("linear", weight, 1, {"x": (rows, (rows.shape[0], weight.width))})
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        whole = torch.empty(weight.rows, weight.width, dtype=x.dtype, device=x.device)
        dequantize(whole, weight, threads=torch.get_num_threads())
        return F.linear(x, whole, bias)
    out = torch.empty(rows.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    if not out.numel() or out.is_meta:
        pass
    elif rows.shape[0] <= FEW_ROWS.get(x.dtype, 0) and weight.width and _host_loops(weight, x.dtype) is not None:
        multiply(out, rows.contiguous(), weight, bias, threads=torch.get_num_threads())
    else:
        _multiply_panels(out, rows, weight, bias)
    return out.view(*x.shape[:-1], weight.rows)


def multiply(out: Tensor, x: Tensor, weight: WeightCodes, bias: Tensor | None = None, *, threads: int = 1) -> None:
    """Fill `out` with x times the transposed matrix, plus the bias, in fp32 and rounded once; groups are along rows.

    Bits depend neither on threads, nor on the vector width, nor on how many rows x has. The order of the sums is in
    weight_loops.h.

    Shapes: out [n, rows], x [n, width], bias [rows], all of one dtype (fp32, bf16, fp16), contiguous, beside the codes.

    Raises:
        ValueError: shapes, layouts, devices, dtypes or threads do not fit.
    """
    _check_product("multiply", out, x, weight, bias, threads)
    if torch._C._len_torch_dispatch_stack():  # somebody counts or traces what is computed
        _multiply.op(out, x, *weight[:5], bias, threads)
    else:
        _run_multiply(out, x, *weight[:5], bias, threads)


def _run_multiply(
    out: Tensor, x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor | None, width: int, group: int,
    bias: Tensor | None, threads: int,
) -> None:  # fmt: skip
    weight = WeightCodes(codes, scales, offsets, width, group)
    module = _host_loops(weight, x.dtype)
    if out.is_meta or not out.numel():
        return
    if module is None:
        multiply_reference(out, x, weight, bias)
        return
    at = 0 if bias is None else bias.data_ptr()
    module.multiply(
        out.data_ptr(), x.data_ptr(), at, x.shape[0], KINDS[x.dtype], *_numbers(weight), threads
    )  # fmt: skip


_multiply = ops.define(
    "multiply_codes(Tensor(a!) out, Tensor x, Tensor codes, Tensor scales, Tensor? offsets, int width, int group, "
    "Tensor? bias, int threads) -> ()",
    _run_multiply,
    lambda *_: None,
)


@torch.no_grad()
def multiply_reference(
    out: Tensor, x: Tensor, weight: WeightCodes, bias: Tensor | None = None, *, threads: int = 1
) -> None:
    """As `multiply`, in torch, with the same bits; `threads` is accepted for symmetry."""
    _check_product("multiply", out, x, weight, bias, threads)
    x_groups, groups = _arranged(x.float(), weight), weight.scales.shape[1]
    step = max(1, REFERENCE_SPAN // max(1, x.shape[0] * _LANE))
    for first in range(0, weight.rows, step):
        part = weight.part(first, min(first + step, weight.rows))
        lanes = torch.zeros(x.shape[0], part.rows, _LANE, device=x.device)
        for g, (of_x, codes) in enumerate(zip(x_groups, _arranged(_integers(part).float(), weight), strict=True)):
            for begin in range(0, of_x.shape[1], _RUN):
                run = torch.zeros_like(lanes)
                for j in range(begin, min(begin + _RUN, of_x.shape[1])):
                    run = run + codes[None, :, j] * of_x[:, None, j]
                lanes = lanes + part.scales[None, :, g, None] * run
        if part.offsets is not None:
            sums = torch.stack([_join(_sum_steps(of_x)) for of_x in x_groups], dim=1)
            for g in range(groups):
                lanes[..., g % _LANE] += part.offsets[None, :, g] * sums[:, None, g]
        total = _join(lanes)
        out[:, first : first + part.rows] = total if bias is None else total + bias[first : first + part.rows].float()


def _arranged(x: Tensor, weight: WeightCodes) -> list[Tensor]:
    """For each group its steps [n, steps, 16], filled up with zeros; of 4 bits even and odd elements take turns."""
    found = []
    for part in x.split(weight.group, dim=1):
        if weight.bits == 8:
            found.append(F.pad(part, (0, -part.shape[1] % _LANE)).view(x.shape[0], -1, _LANE))
        else:
            pairs = F.pad(part, (0, -part.shape[1] % (2 * _LANE))).view(x.shape[0], -1, _LANE, 2)
            found.append(pairs.transpose(2, 3).reshape(x.shape[0], -1, _LANE))
    return found


def _sum_steps(steps: Tensor) -> Tensor:
    total = torch.zeros_like(steps[:, 0])
    for j in range(steps.shape[1]):
        total = total + steps[:, j]
    return total


def _join(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _multiply_panels(out: Tensor, x: Tensor, weight: WeightCodes, bias: Tensor | None) -> None:
    """Fill `out` with the product; a panel of rows of the matrix exists at a time."""
    step = max(_LANE, PANEL // max(1, weight.width) // _LANE * _LANE)
    step = step if weight.dim else -(-step // weight.group) * weight.group
    panel = torch.empty(min(step, weight.rows), weight.width, dtype=x.dtype, device=x.device)
    threads = torch.get_num_threads()
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        values = panel[: last - first]
        dequantize(values, weight.part(first, last), threads=threads)
        product = x @ values.t()
        out[:, first:last] = product if bias is None else product.add_(bias[first:last])


# -- both ------------------------------------------------------------------------------------------------------------


def _host_loops(weight: WeightCodes, dtype: torch.dtype) -> ModuleType | None:
    is_fit = weight.codes.device.type == "cpu" and weight.dim == 1 and dtype in _FLOATS
    return status.compiled("weight_codes") if is_fit else None


def _numbers(weight: WeightCodes) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    offsets = 0 if weight.offsets is None else weight.offsets.data_ptr()
    addresses = (weight.codes.data_ptr(), weight.scales.data_ptr(), offsets)
    return addresses, (weight.rows, weight.width, min(weight.group, weight.width)), weight.bits


def _check_product(where: str, out: Tensor, x: Tensor, weight: WeightCodes, bias: Tensor | None, threads: int) -> None:
    count = x.shape[0] if x.dim() else 0
    tensors: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "out": (out, (count, weight.rows)),
        "x": (x, (count, weight.width)),
    }
    if bias is not None:
        tensors["bias"] = (bias, (weight.rows,))
    _check(where, weight, threads, tensors)
    if {x.dtype, out.dtype, x.dtype if bias is None else bias.dtype} != {x.dtype} or x.dtype not in _FLOATS:
        msg = f"{where}: x is {x.dtype}, out {out.dtype}; use fp32, bf16 or fp16, the same for all, the bias too"
        raise ValueError(msg)
    if weight.dim != 1:
        msg = f"{where}: groups are along columns; their products go through `linear`"
        raise ValueError(msg)


def _check(where: str, weight: WeightCodes, threads: int, tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Refuse what compiled code could not address."""
    check_threads(where, threads)
    codes, scales = shapes(weight.rows, weight.width, weight.bits, weight.group, weight.dim)
    for name, x, shape in (("codes", weight.codes, codes), ("scales", weight.scales, scales)):
        if tuple(x.shape) != shape or not x.is_contiguous():
            msg = f"{where}: {name} of shape {tuple(x.shape)}; needed are contiguous {shape}"
            raise ValueError(msg)
    for name, (x, wanted) in tensors.items():
        if tuple(x.shape) != wanted or x.device != weight.codes.device or (name != "x" and not x.is_contiguous()):
            msg = (
                f"{where}: {name} of shape {tuple(x.shape)} on {x.device}; needed is {wanted} on {weight.codes.device}"
            )
            raise ValueError(msg)
    of_offsets = weight.scales if weight.offsets is None else weight.offsets
    if of_offsets.shape != weight.scales.shape or {weight.scales.dtype, of_offsets.dtype} != {torch.float32}:
        msg = (
            f"{where}: scales and offsets of {weight.scales.dtype} and {of_offsets.dtype}; both are fp32, of one shape"
        )
        raise ValueError(msg)
