"""Block quantizers: flat floats as 8- or 4-bit integers with one fp32 scale per block, and their sums.

A block of largest magnitude m has the scale s = m / L with L = 127 (8 bits) or 7 (4 bits), and the codes
round(x / s), ties to even, between -L and L. The error of an element is at most s / 2 + m * 2**-23: half
a level, and the roundings of the quotient and of the product. Two corners:

- Scales below 2**-126 become 2**-126, and blocks with m <= 2**-127 become zeros, so that scales are normal floats.
- A block with an infinity or a NaN has the scale NaN: it comes back as NaN throughout, so that an overflow is seen.

Tensors are on the host or all on one device, where kernels give the same bytes, so that either can decode the other's.
A device without kernels gets the references. Of tensors on meta the lengths, dtypes and layouts are checked; no more.

Quantizing values again after dequantizing them to their dtype gives the same bytes.

Source of the scheme: ZeRO++ (arXiv 2306.10209), block quantization of weights and gradients; LoCo
(arXiv 2407.04480) for the error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.native import device_quant, status
from mpispeed.native.codes import BITS, BLOCK_UNIT, LEVELS, Coded, Grid
from mpispeed.native.cuda import launcher
from mpispeed.native.flat import KINDS, REFERENCE_SPAN, divisor
from mpispeed.native.status import check_tensors, check_threads, overlaps

FALLBACK_BLOCK = 2048
"""Elements. The block where the counting rule has no answer."""

_RULE_LENGTH = 8000
_RULE_GROUP = 8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST_SCALE = 2.0**-126
# The largest floats that stay finite times the number of levels.
_LARGEST_SCALE = {8: float.fromhex("0x1.020406p+121"), 4: float.fromhex("0x1.249248p+125")}
_MAGNITUDE, _INFINITY, _HALF_SMALLEST = 0x7FFFFFFF, 0x7F800000, 0x00400000


def block_count(count: int) -> int:
    """Blocks for `count` elements: the fewest, of at most 8000 elements each, that are equal multiples of 8 elements.

    Where no such division exists (`count` is no multiple of 8) it is the number of blocks of 2048 elements.
    2**20 elements give 256 blocks of 4096, 2**18 give 64, and 8000 or 1024 give one.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        msg = f"block_count: {count} elements; pass 0 or more"
        raise ValueError(msg)
    if count % _RULE_GROUP or count == 0:
        return -(-count // FALLBACK_BLOCK)
    groups = count // _RULE_GROUP
    # Counting blocks upwards from the fewest is counting their length downwards.
    most = groups // -(-count // _RULE_LENGTH)
    return groups // next(length for length in range(most, 0, -1) if groups % length == 0)


def default_block(count: int) -> int:
    """The block length for `count` elements: that of `block_count`, rounded up to a multiple of 256 elements."""
    length = -(-count // max(1, block_count(count)))
    return max(1, -(-length // BLOCK_UNIT)) * BLOCK_UNIT


def quantize(
    coded: Coded, x: Tensor, grid: Grid, *, error: Coded | None = None, beta: float = 0.0, threads: int = 1
) -> None:
    """Fill `coded` with the codes and scales of `x`.

    With `error` (8 bits), v = x + error is quantized and the kept error becomes the moving average
    beta * error + (1 - beta) * (v - dequantized v), again in 8 bits; it becomes zero in blocks that are not finite.

    Shapes:
        x [grid.numel] in fp32, bf16 or fp16; all tensors are contiguous and on one device, which may be the host.
        `threads` is for the host.

    Raises:
        ValueError: lengths, layouts, overlaps, beta or threads do not fit.
        TypeError: a dtype does not fit.
    """
    _check("quantize", grid, {"coded": coded}, {"x": x}, [], error=error, beta=beta, threads=threads)
    if x.is_meta:
        return
    if kernels := launcher.for_tensor(x):
        device_quant.encode(kernels, coded, x, [], grid, error, beta)
        return
    module = _host_loops(x)
    if module is None:
        quantize_reference(coded, x, grid, error=error, beta=beta)
        return
    module.encode(x.data_ptr(), KINDS[x.dtype], _numbers(grid), _target(coded), _kept(error), beta, threads)


def sum_requantize(
    coded: Coded,
    parts: Sequence[Coded],
    grid: Grid,
    *,
    error: Coded | None = None,
    beta: float = 0.0,
    threads: int = 1,
) -> None:
    """Fill `coded` with the codes and scales of the sum of `parts`, dequantized and added in list order in fp32.

    `error` and `beta` are those of `quantize`.

    Shapes:
        `coded` and every part belong to `grid`; their bits may differ from each other's.

    Raises:
        ValueError: there are no parts, or lengths, layouts, overlaps, beta or threads do not fit.
        TypeError: a dtype does not fit.
    """
    _check("sum_requantize", grid, {"coded": coded}, {}, parts, error=error, beta=beta, threads=threads)
    if coded.codes.is_meta:
        return
    if kernels := launcher.for_tensor(coded.codes):
        device_quant.encode(kernels, coded, None, parts, grid, error, beta)
        return
    module = _host_loops(coded.codes)
    if module is None:
        sum_requantize_reference(coded, parts, grid, error=error, beta=beta)
        return
    module.encode_sum(*_addends(parts), _numbers(grid), _target(coded), _kept(error), beta, threads)


def dequantize(out: Tensor, coded: Coded, grid: Grid, *, threads: int = 1) -> None:
    """Fill `out` (fp32, bf16 or fp16) with the values of `coded`, rounded once.

    Raises:
        ValueError, TypeError: as `quantize`.
    """
    _decode("dequantize", out, [coded], grid, 1.0, is_added=False, threads=threads)


def dequantize_add(out: Tensor, coded: Coded, grid: Grid, *, threads: int = 1) -> None:
    """Add the values of `coded` to `out`, in fp32, rounded once.

    Raises:
        ValueError, TypeError: as `quantize`.
    """
    _decode("dequantize_add", out, [coded], grid, 1.0, is_added=True, threads=threads)


def dequantize_sum(out: Tensor, parts: Sequence[Coded], grid: Grid, *, scale: float = 1.0, threads: int = 1) -> None:
    """Fill `out` with `scale` times the sum of `parts`, added in list order in fp32 and rounded once.

    Raises:
        ValueError, TypeError: as `quantize`; there are no parts, or their bits differ.
    """
    _decode("dequantize_sum", out, parts, grid, scale, is_added=False, threads=threads)


# -- references
# -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_reference(
    coded: Coded, x: Tensor, grid: Grid, *, error: Coded | None = None, beta: float = 0.0, threads: int = 1
) -> None:
    """As `quantize`, in torch, with the same bits; `threads` is accepted for symmetry.

    Raises:
        ValueError, TypeError: as `quantize`.
    """
    _check("quantize", grid, {"coded": coded}, {"x": x}, [], error=error, beta=beta, threads=threads)
    flat = x.detach().view(-1)
    for span in _spans(grid):
        _encode_span(coded, flat[span.elements].float(), span, error, beta)


@torch.no_grad()
def sum_requantize_reference(
    coded: Coded,
    parts: Sequence[Coded],
    grid: Grid,
    *,
    error: Coded | None = None,
    beta: float = 0.0,
    threads: int = 1,
) -> None:
    """As `sum_requantize`, in torch, with the same bits.

    Raises:
        ValueError, TypeError: as `sum_requantize`.
    """
    _check("sum_requantize", grid, {"coded": coded}, {}, parts, error=error, beta=beta, threads=threads)
    for span in _spans(grid):
        _encode_span(coded, _sum_span(parts, span, None), span, error, beta)


def dequantize_reference(out: Tensor, coded: Coded, grid: Grid, *, threads: int = 1) -> None:
    """As `dequantize`, in torch, with the same bits.

    Raises:
        ValueError, TypeError: as `quantize`.
    """
    _decode_reference("dequantize", out, [coded], grid, 1.0, is_added=False, threads=threads)


def dequantize_add_reference(out: Tensor, coded: Coded, grid: Grid, *, threads: int = 1) -> None:
    """As `dequantize_add`, in torch, with the same bits.

    Raises:
        ValueError, TypeError: as `quantize`.
    """
    _decode_reference("dequantize_add", out, [coded], grid, 1.0, is_added=True, threads=threads)


def dequantize_sum_reference(
    out: Tensor, parts: Sequence[Coded], grid: Grid, *, scale: float = 1.0, threads: int = 1
) -> None:
    """The same as `dequantize_sum` in torch, with the same bits.

    Raises:
        ValueError, TypeError: as `dequantize_sum`.
    """
    _decode_reference("dequantize_sum", out, parts, grid, scale, is_added=False, threads=threads)


class _Span(NamedTuple):
    """A range of whole blocks of one piece, and the places of its codes and scales."""

    elements: slice
    nibbles: slice
    scales: slice
    block: int

    def codes(self, bits: int) -> slice:
        return self.elements if bits == 8 else self.nibbles

    def rows(self, x: Tensor) -> Tensor:
        """One row per block; a short one is filled up with zeros."""
        return torch.nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)


def _spans(grid: Grid) -> Iterator[_Span]:
    blocks = max(1, REFERENCE_SPAN // grid.block)
    step = blocks * grid.block
    for piece in range(grid.pieces):
        start, byte, row = piece * grid.piece, piece * grid.codes(4) // grid.pieces, piece * grid.scales // grid.pieces
        for begin in range(0, grid.piece, step):
            end = min(begin + step, grid.piece)
            yield _Span(
                slice(start + begin, start + end),
                slice(byte + begin // 2, byte + (end + 1) // 2),
                slice(row + begin // grid.block, row + -(-end // grid.block)),
                grid.block,
            )


def _values(coded: Coded, span: _Span) -> Tensor:
    """The dequantized elements of a span."""
    codes = coded.codes[span.codes(coded.bits)]
    count = span.elements.stop - span.elements.start
    if coded.bits == 4:
        wide = codes.to(torch.int16)
        codes = torch.stack((((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8), dim=1).view(-1)[:count]
    return (span.rows(codes.float()) * coded.scales[span.scales].unsqueeze(1)).view(-1)[:count]


def _sum_span(parts: Sequence[Coded], span: _Span, start: Tensor | None) -> Tensor:
    total = start
    for part in parts:
        values = _values(part, span)
        total = values if total is None else total + values
    if total is None:
        msg = "a sum of no parts"
        raise ValueError(msg)
    return total


def levels(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes as floats, and scales [rows, 1], of blocks [rows, elements] in fp32."""
    peak = (rows.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
    magnitude = peak.view(torch.float32)
    scales = (magnitude / divisor(LEVELS[bits], magnitude)).clamp(_SMALLEST_SCALE, _LARGEST_SCALE[bits])
    scales = scales.masked_fill(peak <= _HALF_SMALLEST, 0.0).masked_fill(peak >= _INFINITY, torch.nan)
    is_coded = scales > 0
    codes = torch.round(rows / torch.where(is_coded, scales, 1.0))
    return torch.where(is_coded, codes, 0.0), scales


def _write_codes(coded: Coded, levels: Tensor, scales: Tensor, span: _Span) -> None:
    count = span.elements.stop - span.elements.start
    flat = levels.view(-1)[:count].to(torch.int16)
    if coded.bits == 4:
        pairs = torch.nn.functional.pad(flat & 15, (0, count % 2)).view(-1, 2)
        flat = pairs[:, 0] | (pairs[:, 1] << 4)
    coded.codes[span.codes(coded.bits)].copy_(flat)
    coded.scales[span.scales].copy_(scales.view(-1))


def _encode_span(coded: Coded, x: Tensor, span: _Span, error: Coded | None, beta: float) -> None:
    kept = None if error is None else _values(error, span)
    rows = span.rows(x if kept is None else x + kept)
    codes, scales = levels(rows, coded.bits)
    _write_codes(coded, codes, scales, span)
    if error is None or kept is None:
        return
    average = beta * span.rows(kept) + (1.0 - beta) * (rows - codes * scales)
    error_levels, error_scales = levels(average.masked_fill(scales.isnan(), 0.0), 8)
    _write_codes(error, error_levels, error_scales.nan_to_num(0.0), span)


# -- both ------------------------------------------------------------------------------------------------------------


def _decode(
    where: str, out: Tensor, parts: Sequence[Coded], grid: Grid, scale: float, *, is_added: bool, threads: int
) -> None:
    _check(where, grid, {}, {"out": out}, parts, is_written=True, threads=threads)
    if out.is_meta:
        return
    if kernels := launcher.for_tensor(out):
        device_quant.decode(kernels, out, parts, grid, scale, is_added=is_added)
        return
    module = _host_loops(out)
    if module is None:
        _decode_reference(where, out, parts, grid, scale, is_added=is_added, threads=threads)
        return
    codes, scales, bits = _addends(parts)
    module.decode(out.data_ptr(), KINDS[out.dtype], codes, scales, bits, _numbers(grid), is_added, scale, threads)


@torch.no_grad()
def _decode_reference(
    where: str, out: Tensor, parts: Sequence[Coded], grid: Grid, scale: float, *, is_added: bool, threads: int
) -> None:
    _check(where, grid, {}, {"out": out}, parts, is_written=True, threads=threads)
    flat = out.detach().view(-1)
    for span in _spans(grid):
        place = flat[span.elements]
        place.copy_(_sum_span(parts, span, place.float() if is_added else None) * scale)


def _host_loops(x: Tensor) -> ModuleType | None:
    return status.compiled("block_quant") if x.device.type == "cpu" else None


def _numbers(grid: Grid) -> tuple[int, int, int]:
    return grid.pieces, grid.piece, grid.block


def _target(coded: Coded) -> tuple[int, int, int]:
    return coded.codes.data_ptr(), coded.scales.data_ptr(), coded.bits


def _kept(error: Coded | None) -> tuple[int, int]:
    return (0, 0) if error is None else (error.codes.data_ptr(), error.scales.data_ptr())


def _addends(parts: Sequence[Coded]) -> tuple[list[int], list[int], int]:
    return [part.codes.data_ptr() for part in parts], [part.scales.data_ptr() for part in parts], parts[0].bits


def _check(
    where: str,
    grid: Grid,
    coded: dict[str, Coded],
    floats: dict[str, Tensor],
    parts: Sequence[Coded],
    *,
    is_written: bool = False,
    error: Coded | None = None,
    beta: float = 0.0,
    threads: int,
) -> None:
    """Refuse tensors that compiled code could not address; `is_written` is true if `floats` are results."""
    check_threads(where, threads)
    if not 0.0 <= beta < 1.0:
        msg = f"{where}: beta is {beta}; the weight of the old error is at least 0 and below 1"
        raise ValueError(msg)
    if not parts and where in ("dequantize_sum", "sum_requantize"):
        msg = f"{where}: no parts; pass at least one"
        raise ValueError(msg)
    kept = {} if error is None else {"error": error}
    device = [*(one.codes for one in coded.values()), *floats.values()][0].device
    for name, one in {**coded, **kept, **{f"parts[{i}]": part for i, part in enumerate(parts)}}.items():
        _check_coded(
            where, name, one, grid, device, only=8 if name == "error" else parts[0].bits if name[0] == "p" else None
        )
    for name, x in floats.items():
        if x.dtype not in _FLOATS:
            msg = f"{where}: {name} has dtype {x.dtype}; use fp32, bf16 or fp16"
            raise TypeError(msg)
        _check_length(where, name, x, grid.numel, device)
    written = [x for one in (*coded.values(), *kept.values()) for x in one] + list(floats.values()) * is_written
    read = [x for one in parts for x in one] + list(floats.values()) * (not is_written)
    if any(
        overlaps(a, b) for i, a in enumerate(written) for b in [*written[i + 1 :], *read] if a.numel() and b.numel()
    ):
        msg = f"{where}: a result shares memory with another tensor; give each its own"
        raise ValueError(msg)


def _check_coded(where: str, name: str, coded: Coded, grid: Grid, device: torch.device, only: int | None) -> None:
    if coded.codes.dtype not in BITS or coded.scales.dtype != torch.float32:
        found = f"{coded.codes.dtype} and scales of {coded.scales.dtype}"
        msg = f"{where}: {name} has codes of {found}; use int8 (8 bits) or uint8 (4 bits), and fp32 scales"
        raise TypeError(msg)
    if only is not None and coded.bits != only:
        msg = f"{where}: {name} has codes of {coded.bits} bits where {only} are needed"
        raise TypeError(msg)
    _check_length(where, f"{name}.codes", coded.codes, grid.codes(coded.bits), device)
    _check_length(where, f"{name}.scales", coded.scales, grid.scales, device)


def _check_length(where: str, name: str, x: Tensor, wanted: int, device: torch.device) -> None:
    if check_tensors(where, {name: x}, device=device, takes_meta=True) != wanted:
        msg = f"{where}: {name} has {x.numel()} elements, its grid needs {wanted}"
        raise ValueError(msg)
