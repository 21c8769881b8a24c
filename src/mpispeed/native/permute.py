"""Rows of matrices moved and summed by index: tokens on their way to the experts that they chose, and back.

A token chooses k of the rows of another matrix: `index[t, j]` is the row of its j-th choice, -1 where that was
dropped. Every function has a reference in torch; on a GPU kernels run (`native.device_rows`). Results have the bits of
the reference and depend neither on threads nor on the vector width: `combine_rows` adds the choices of a token in their
order, from the first that was not dropped, and `dot_rows` sums in sixteen fp64 lanes along a row, which are joined in a
fixed order. Products and sums are never fused, but in `dot_rows` on devices, which sums in fp32 in an order of its own.
Of NaNs only the place is fixed.

Places are checked before memory is touched; on a device only if MPISPEED_CHECK_INDICES=1 is set, because a check would
wait for the device.

Source: dropless dispatch by a sort (MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from mpispeed.native import device_rows, status
from mpispeed.native.flat import KINDS, REFERENCE_SPAN
from mpispeed.native.status import check_threads, overlaps
from mpispeed.native.token_drop import CHECK_VARIABLE

_LANES = 16
_DEVICE_SPAN = 1 << 24
"""Elements of a temporary on a device, where each span costs launches."""


def permute_rows(out: Tensor, x: Tensor, index: Tensor, *, threads: int = 1) -> None:
    """out[i] = x[index[i]].

    Shapes: out [M, H], x [T, H] of one dtype, which may be any; index [M] in int64, 0 to T - 1, each as often as
        wanted. All are contiguous and on one device; `threads` is for the host.

    Raises:
        ValueError: shapes, layouts, devices, overlaps or threads do not fit.
        TypeError: dtypes do not fit.
        IndexError: `index` names a row that `x` does not have.
    """
    where = "permute_rows"
    _check_matrices(where, {"out": out, "x": x}, index, ("M",), threads)
    _check_same(where, {"out": (out, "M", index.shape[0])})
    _check_written(where, out, {"x": x, "index": index})
    module = _host_loops(x)
    _check_places(where, module, index, x, "x", may_drop=False)
    if module is None:
        permute_rows_reference(out, x, index)
        return
    sizes = (index.shape[0], 1, x.shape[0], x.shape[1], x.element_size())
    module.pick(out.data_ptr(), x.data_ptr(), index.data_ptr(), sizes, threads)


def combine_rows(out: Tensor, rows: Tensor, index: Tensor, weights: Tensor | None = None, *, threads: int = 1) -> None:
    """out[t] = sum over j of weights[t, j] * rows[index[t, j]], in fp32 (fp64 for fp64), rounded once.

    Without `weights` they are ones. A token all of whose choices were dropped becomes zero.

    Shapes: out [T, H], rows [M, H] in fp32, bf16, fp16 or fp64; index [T, k] in int64, -1 to M - 1, each as often as
        wanted; weights [T, k] in fp32 (fp64 for fp64). All are contiguous and on one device.

    Raises:
        ValueError, TypeError, IndexError: as `permute_rows`.
    """
    where = "combine_rows"
    _check_floats(where, {"out": out, "rows": rows}, index, weights, threads)
    _check_same(where, {"out": (out, "T", index.shape[0])})
    _check_written(where, out, {"rows": rows, "index": index, "weights": weights})
    runs, module = device_rows.runs_for(rows), _host_loops(rows)
    _check_places(where, module, index, rows, "rows", may_drop=True)
    if runs is not None:
        device_rows.combine(runs, out, rows, index, weights)
        return
    if module is None:
        combine_rows_reference(out, rows, index, weights)
        return
    addresses = (out.data_ptr(), rows.data_ptr(), index.data_ptr(), _address(weights))
    module.combine(*addresses, _sizes(index, rows), KINDS[rows.dtype], threads)


def spread_rows(out: Tensor, x: Tensor, index: Tensor, weights: Tensor | None = None, *, threads: int = 1) -> None:
    """out[index[t, j]] = weights[t, j] * x[t], in fp32 (fp64 for fp64), rounded once; other rows become zero.

    Without `weights` rows are copied. This is the gradient of `combine_rows` in `rows`, and that is its own in `x`.

    Shapes: out [M, H], x [T, H]; index [T, k] in int64, -1 or a row of `out`, each at most once; the rest is as in
        `combine_rows`.

    Raises:
        ValueError, TypeError, IndexError: as `permute_rows`; or two choices name one row.
    """
    where = "spread_rows"
    _check_floats(where, {"out": out, "x": x}, index, weights, threads)
    _check_same(where, {"x": (x, "T", index.shape[0])})
    _check_written(where, out, {"x": x, "index": index, "weights": weights})
    runs, module = device_rows.runs_for(x), _host_loops(x)
    named = _check_distinct(where, module, index, out)
    if runs is not None:
        device_rows.spread(runs, out, x, index, weights)
        return
    if module is None:
        spread_rows_reference(out, x, index, weights)
        return
    addresses = (out.data_ptr(), x.data_ptr(), index.data_ptr(), _address(weights), _address(named))
    module.spread(*addresses, _sizes(index, out), KINDS[x.dtype], threads)


def dot_rows(out: Tensor, x: Tensor, rows: Tensor, index: Tensor, *, threads: int = 1) -> None:
    """out[t, j] = sum over h of x[t, h] * rows[index[t, j], h], in fp64; 0 for a dropped choice.

    This is the gradient of `combine_rows` in `weights`.

    Shapes: out [T, k] in fp32 (fp64 for fp64), x [T, H], rows [M, H]; the rest is as in `combine_rows`.

    Raises:
        ValueError, TypeError, IndexError: as `permute_rows`.
    """
    where = "dot_rows"
    _check_floats(where, {"x": x, "rows": rows}, index, out, threads, name="out")
    _check_same(where, {"x": (x, "T", index.shape[0])})
    _check_written(where, out, {"x": x, "rows": rows, "index": index})
    runs, module = device_rows.runs_for(rows), _host_loops(rows)
    _check_places(where, module, index, rows, "rows", may_drop=True)
    if runs is not None:
        device_rows.dot(runs, out, x, rows, index)
        return
    if module is None:
        dot_rows_reference(out, x, rows, index)
        return
    addresses = (out.data_ptr(), rows.data_ptr(), x.data_ptr(), index.data_ptr())
    module.dot(*addresses, _sizes(index, rows), KINDS[rows.dtype], threads)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and weights: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- references ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def permute_rows_reference(out: Tensor, x: Tensor, index: Tensor) -> None:
    """As `permute_rows`, in torch."""
    out.copy_(x.index_select(0, index))


@torch.no_grad()
def combine_rows_reference(out: Tensor, rows: Tensor, index: Tensor, weights: Tensor | None = None) -> None:
    """As `combine_rows`, in torch, with the same bits."""
    if not rows.shape[0]:
        out.zero_()
        return
    for span in _spans(index, rows):
        total = torch.zeros_like(out[span], dtype=working_dtype(rows.dtype))
        is_begun = torch.zeros_like(index[span, :1], dtype=torch.bool)
        for j in range(index.shape[1]):
            place = index[span, j]
            is_kept = (place >= 0).unsqueeze(1)
            term = rows[place.clamp(min=0)].to(total.dtype)
            if weights is not None:
                term = term * weights[span, j].unsqueeze(1)
            total = torch.where(is_kept, torch.where(is_begun, total + term, term), total)
            is_begun = is_begun | is_kept
        out[span] = total.to(out.dtype)


@torch.no_grad()
def spread_rows_reference(out: Tensor, x: Tensor, index: Tensor, weights: Tensor | None = None) -> None:
    """As `spread_rows`, in torch, with the same bits."""
    filled = torch.zeros((out.shape[0] + 1, out.shape[1]), dtype=out.dtype, device=out.device)
    for j in range(index.shape[1]):
        row = x if weights is None else (x.to(weights.dtype) * weights[:, j].unsqueeze(1)).to(x.dtype)
        filled[index[:, j]] = row  # -1 is the last row, which is left out below
    out.copy_(filled[:-1])


@torch.no_grad()
def dot_rows_reference(out: Tensor, x: Tensor, rows: Tensor, index: Tensor) -> None:
    """As `dot_rows`, in torch; on the host with the same bits."""
    if not rows.shape[0]:
        out.zero_()
        return
    for span in _spans(index, rows):
        for j in range(index.shape[1]):
            place = index[span, j]
            sums = _dots(x[span], rows[place.clamp(min=0)])
            out[span, j] = torch.where(place >= 0, sums, torch.zeros_like(sums)).to(out.dtype)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """Products of rows: on the host in the lanes of the compiled loop."""
    if x.device.type != "cpu":
        work = working_dtype(x.dtype)
        return (x.to(work) * y.to(work)).sum(1)
    product = torch.nn.functional.pad(x.double() * y.double(), (0, -x.shape[1] % _LANES))
    lanes = torch.zeros(x.shape[0], _LANES, dtype=torch.float64)
    for column in product.view(x.shape[0], -1, _LANES).unbind(1):
        lanes = lanes + column
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _spans(index: Tensor, rows: Tensor) -> Iterator[slice]:
    """Ranges of tokens, so that temporaries stay small."""
    span = REFERENCE_SPAN if rows.device.type == "cpu" else _DEVICE_SPAN
    step = max(1, span // max(1, rows.shape[1]))
    for begin in range(0, index.shape[0], step):
        yield slice(begin, begin + step)


# -- checks and addresses --------------------------------------------------------------------------------------------


def _host_loops(x: Tensor) -> ModuleType | None:
    """The compiled loops, or None: the reference runs instead."""
    return status.compiled("permute") if x.device.type == "cpu" else None


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _sizes(index: Tensor, rows: Tensor) -> tuple[int, int, int, int, int]:
    return index.shape[0], index.shape[1], rows.shape[0], rows.shape[1], rows.element_size()


def _check_matrices(
    where: str, matrices: Mapping[str, Tensor], index: Tensor, dims: tuple[str, ...], threads: int
) -> None:
    check_threads(where, threads)
    first, x = next(iter(matrices.items()))
    for name, matrix in matrices.items():
        if matrix.dim() != 2 or matrix.shape[1] != x.shape[-1]:
            msg = f"{where}: {name} has shape {tuple(matrix.shape)}; all matrices need two dims and one row length"
            raise ValueError(msg)
        if matrix.dtype != x.dtype:
            msg = f"{where}: {name} is {matrix.dtype} and {first} is {x.dtype}; convert one of them"
            raise TypeError(msg)
    if index.dtype != torch.int64:
        msg = f"{where}: index has dtype {index.dtype}; use int64"
        raise TypeError(msg)
    if index.dim() != len(dims):
        msg = f"{where}: index has shape {tuple(index.shape)}; expected [{', '.join(dims)}]"
        raise ValueError(msg)
    for name, tensor in {**matrices, "index": index}.items():
        _check_place_of(where, name, tensor, first, x)


def _check_floats(
    where: str,
    matrices: Mapping[str, Tensor],
    index: Tensor,
    weights: Tensor | None,
    threads: int,
    name: str = "weights",
) -> None:
    _check_matrices(where, matrices, index, ("T", "k"), threads)
    first, x = next(iter(matrices.items()))
    if x.dtype not in KINDS:
        msg = f"{where}: {first} is {x.dtype}; use fp32, bf16, fp16 or fp64"
        raise TypeError(msg)
    if weights is None:
        return
    if weights.dtype != working_dtype(x.dtype):
        msg = f"{where}: {name} is {weights.dtype}; with {first} in {x.dtype} use {working_dtype(x.dtype)}"
        raise TypeError(msg)
    if weights.shape != index.shape:
        msg = f"{where}: {name} has shape {tuple(weights.shape)}; index needs {tuple(index.shape)}"
        raise ValueError(msg)
    _check_place_of(where, name, weights, first, x)


def _check_place_of(where: str, name: str, tensor: Tensor, first: str, x: Tensor) -> None:
    if tensor.device != x.device:
        msg = f"{where}: {name} is on {tensor.device} and {first} is on {x.device}; put all on one device"
        raise ValueError(msg)
    if not tensor.is_contiguous():
        msg = f"{where}: {name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass a contiguous tensor"
        raise ValueError(msg)
    if tensor.is_conj() or tensor.is_neg():
        msg = f"{where}: {name} is a conjugate or negative that is not in memory; use resolve_conj().resolve_neg()"
        raise ValueError(msg)


def _check_same(where: str, lengths: Mapping[str, tuple[Tensor, str, int]]) -> None:
    for name, (x, dim, wanted) in lengths.items():
        if x.shape[0] != wanted:
            msg = f"{where}: {name} has {x.shape[0]} rows and index {wanted}; both have to be {dim}"
            raise ValueError(msg)


def _check_written(where: str, out: Tensor, read: Mapping[str, Tensor | None]) -> None:
    for name, x in read.items():
        if x is not None and overlaps(out, x):
            msg = f"{where}: out and {name} overlap; use another buffer for out"
            raise ValueError(msg)


def _is_checked(index: Tensor) -> bool:
    return index.device.type == "cpu" or os.environ.get(CHECK_VARIABLE, "") == "1"


def _check_places(
    where: str, module: ModuleType | None, index: Tensor, rows: Tensor, name: str, *, may_drop: bool
) -> None:
    count, least = rows.shape[0], -1 if may_drop else 0
    if not _is_checked(index):
        return
    if module is not None:
        wrong = module.wrong_place(index.data_ptr(), index.numel(), count, may_drop, 0)
    else:
        wrong = _first(((index < least) | (index >= count)).view(-1))
    if wrong >= 0:
        _refuse(where, index, wrong, name, count, may_drop)


def _check_distinct(where: str, module: ModuleType | None, index: Tensor, out: Tensor) -> Tensor | None:
    """Which rows are named, as ones and zeros, or None if all are; for the compiled loops only."""
    count = out.shape[0]
    if module is None:
        _check_places(where, None, index, out, "out", may_drop=True)
        if _is_checked(index):
            kept = index[index >= 0]
            ordered, order = kept.sort(stable=True)
            again = order[1:][ordered[1:] == ordered[:-1]]
            if again.numel():
                place = int((index.view(-1) >= 0).nonzero()[int(again.min())])
                _refuse(where, index, place, "out", count, may_drop=True)
        return None
    named = torch.zeros(count, dtype=torch.uint8)
    wrong = module.wrong_place(index.data_ptr(), index.numel(), count, True, named.data_ptr())
    if wrong >= 0:
        _refuse(where, index, wrong, "out", count, may_drop=True)
    return None if bool(named.all()) else named


def _first(is_wrong: Tensor) -> int:
    """The place of the first True, or -1."""
    places = is_wrong.nonzero()
    return int(places[0]) if places.numel() else -1


def _refuse(where: str, index: Tensor, wrong: int, name: str, count: int, may_drop: bool) -> NoReturn:
    """Raises IndexError: a row that is not there; ValueError: one that is named twice."""
    value = int(index.view(-1)[wrong])
    place = ", ".join(map(str, divmod(wrong, index.shape[1]))) if index.dim() == 2 else str(wrong)
    if (-1 if may_drop else 0) <= value < count:
        msg = f"{where}: index[{place}] is {value}, as is an earlier choice; a row of {name} belongs to one choice"
        raise ValueError(msg)
    allowed = ", and -1 for a dropped choice" if may_drop else ""
    msg = f"{where}: index[{place}] is {value}, but {name} has {count} rows; they are 0 to {count - 1}{allowed}"
    raise IndexError(msg)
