"""Sum of squares of many tensors and a check that all elements are finite, in one read; both stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpispeed.native.cuda.catalog import TAGS
from mpispeed.native.cuda.launcher import for_tensor
from mpispeed.native.device_optim import stream_of, upload
from mpispeed.native.flat import REFERENCE_SPAN

CHUNK, THREADS = 32768, 256  # elements of a block, and its threads; cuda/optim/global_norm.cu has the same numbers
_TOTAL_THREADS = 1024

_ROW = np.dtype([("at", np.uint64), ("count", np.uint64)])
_CHUNK = np.dtype([("row", np.uint32), ("index", np.uint32)])


class _Table(NamedTuple):
    rows: Tensor
    chunks: Tensor
    launches: tuple[tuple[str, int, int], ...]  # kernel, first chunk, chunks
    total: int


def norm_and_finite(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of squares of all elements, and whether all are finite.

    A sum of fp32, bf16 and fp16 elements cannot overflow; it is taken in fp64 in an order that dtypes and shapes alone
    decide, and is within `elements * 2^-53` of the exact one, relatively. Nothing waits for the device.

    Shapes:
        tensors: any number of contiguous tensors of any shape on one device.
        result: an fp64 scalar and a bool scalar on that device; of no tensors, 0 and true on the host.

    Raises:
        ValueError: a tensor is not contiguous, or on another device than the first.
        TypeError: a tensor is not of a floating dtype.
    """
    _check(tensors)
    launcher = for_tensor(tensors[0]) if tensors else None
    if launcher is None or any(x.dtype not in TAGS for x in tensors):
        return norm_and_finite_reference(tensors)
    device = tensors[0].device
    given = tuple((x.data_ptr(), x.numel(), TAGS[x.dtype]) for x in tensors if x.numel())
    table = _table(device, stream_of(device), given)
    partials = torch.empty(table.total, dtype=torch.float64, device=device)
    squares = torch.empty((), dtype=torch.float64, device=device)
    is_finite = torch.empty((), dtype=torch.bool, device=device)
    for kernel, first, count in table.launches:
        chunks = table.chunks.data_ptr() + first * _CHUNK.itemsize
        launcher.launch(
            kernel, (count, 1, 1), (THREADS, 1, 1), table.rows.data_ptr(), chunks, partials.data_ptr() + 8 * first
        )
    launcher.launch(
        "square_sum_total",
        (1, 1, 1),
        (_TOTAL_THREADS, 1, 1),
        partials.data_ptr(),
        squares.data_ptr(),
        is_finite.data_ptr(),
        table.total,
    )
    return squares, is_finite


@torch.no_grad()
def norm_and_finite_reference(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`norm_and_finite` in torch; also for fp64, whose squares may overflow while all elements are finite."""
    device = tensors[0].device if tensors else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    is_finite = torch.ones((), dtype=torch.bool, device=device)
    for x in tensors:
        for span in x.detach().view(-1).split(REFERENCE_SPAN):
            squares += span.double().square().sum()
            is_finite &= torch.isfinite(span).all()
    return squares, is_finite


def _check(tensors: Sequence[Tensor]) -> None:
    for position, x in enumerate(tensors):
        if not x.dtype.is_floating_point:
            msg = f"norm: tensor {position} has dtype {x.dtype}; pass floating-point tensors"
            raise TypeError(msg)
        if x.device != tensors[0].device:
            msg = f"norm: tensor {position} is on {x.device} and the first on {tensors[0].device}; take each by itself"
            raise ValueError(msg)
        if x.layout != torch.strided or not x.is_contiguous():
            msg = f"norm: tensor {position} of shape {tuple(x.shape)} is not dense and contiguous; make it so"
            raise ValueError(msg)


@lru_cache(maxsize=16)
def _table(device: torch.device, stream: int, given: tuple[tuple[int, int, str], ...]) -> _Table:
    """Rows by dtype. The table holds addresses and no tensors, so it stays right whatever lies there later."""
    del stream  # the one on which the table gets to the device: another one has its own
    ordered = sorted(given, key=lambda entry: entry[2])
    rows = np.array([entry[:2] for entry in ordered], np.uint64).reshape(-1, 2)
    counts = (rows[:, 1].astype(np.int64) + CHUNK - 1) // CHUNK
    starts = np.cumsum(counts) - counts
    chunks = np.empty(int(counts.sum()), _CHUNK)
    chunks["row"] = np.repeat(np.arange(len(rows)), counts)
    chunks["index"] = np.arange(len(chunks)) - np.repeat(starts, counts)
    tags = np.array([entry[2] for entry in ordered])
    found, first = [], 0
    for tag in sorted(TAGS.values()):
        own = int(counts[tags == tag].sum())
        if own:
            found.append((f"square_sum_{tag}", first, own))
        first += own
    return _Table(upload(rows, device), upload(chunks, device), tuple(found), len(chunks))
