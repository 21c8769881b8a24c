"""Gather and scatter of tokens of a batch, with gradients, for layers that work on some tokens only.

The tokens of a sample are named by places, which are distinct and in any order. On the host compiled loops copy rows,
and places are checked; on a device they are the caller's duty, because a check would wait for the device: a wrong place
there gives a row of zeros or is left out, and of double ones an arbitrary row counts. With MPISPEED_CHECK_INDICES=1
devices are checked, too.

Source: random layerwise token dropping (arXiv 2211.11586).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpispeed.native import status
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.cuda.launcher import Launcher

CHECK_VARIABLE = "MPISPEED_CHECK_INDICES"
"""Set to 1 to have places checked on devices, too."""

_INDEX_TAGS = {torch.int32: "i32", torch.int64: "i64"}
_THREADS, _WARP, _AHEAD = 256, 32, 4  # _AHEAD: units of a thread that travel at once
_WIDTHS = (16, 8, 4, 2, 1)


def gather(x: Tensor, index: Tensor, *, batch_first: bool = True) -> Tensor:
    """Pick tokens of `x`; its gradient puts them back among zeros.

    Shapes: x [B, S, ...], index [B, K] in int32 or int64, the result [B, K, ...]. Without `batch_first` x is
    [S, B, ...] and the result [K, B, ...]; index is still [B, K].

    Raises:
        ValueError: shapes, dtypes or devices do not fit; a place is not in [0, S) or named twice.
    """
    _check("gather", x, index, batch_first)
    picked: Tensor = _gather(x, index, batch_first)
    return picked


def scatter(y: Tensor, index: Tensor, into: Tensor, *, batch_first: bool = True) -> Tensor:
    """`into` with the tokens of `y` in the places `index`, as a new tensor.

    The gradient of `y` is that of its places, the gradient of `into` is zero there.

    Shapes: y [B, K, ...], index [B, K] in int32 or int64, `into` and the result [B, S, ...]. Without `batch_first` y is
    [K, B, ...] and `into` [S, B, ...].

    Raises:
        ValueError: shapes, dtypes or devices do not fit; a place is not in [0, S) or named twice.
    """
    _check_put("scatter", y, index, into, batch_first)
    merged: Tensor = _merge(y, into, index, into.shape[_token_dim(batch_first)], batch_first)
    return merged


def take(x: Tensor, index: Tensor, *, batch_first: bool = True) -> tuple[Tensor, Tensor]:
    """Pick tokens of `x` as `gather` does, and hand `x` on to `put`, which joins what became of them with the rest.

    Both together have the gradients of `gather` and `scatter` with half the passes over memory: the gradient of `x` is
    that of the picked tokens in their places and that of the result elsewhere, copied once.

    Returns:
        the picked tokens, and `x` for `put`; nothing else may use that, because its gradient is whole only there.

    Raises:
        ValueError: as `gather`.
    """
    _check("take", x, index, batch_first)
    taken, rest = _Take.apply(x, index, batch_first)
    return taken, rest


def put(y: Tensor, index: Tensor, rest: Tensor, *, batch_first: bool = True) -> Tensor:
    """The tokens of `y` in the places `index` of `rest`, which comes from `take` with the same places.

    Dtypes that differ are joined to the wider one.

    Raises:
        ValueError: as `scatter`.
    """
    _check_put("put", y, index, rest, batch_first)
    wide = torch.promote_types(y.dtype, rest.dtype)
    merged: Tensor = _Put.apply(y.to(wide), index, rest.to(wide), batch_first)
    return merged


def gather_reference(x: Tensor, index: Tensor, batch_first: bool) -> Tensor:
    """`gather` in torch."""
    return x.gather(_token_dim(batch_first), _wide_index(index, x, batch_first))


def merge_reference(y: Tensor | None, into: Tensor | None, index: Tensor, tokens: int, batch_first: bool) -> Tensor:
    """`scatter` in torch; without `y` the places become zero, without `into` all others are."""
    base = (
        _base(y, into, tokens, batch_first).zero_()
        if into is None
        else into.clone(memory_format=torch.contiguous_format)
    )
    places, dim = _wide_index(index, base, batch_first), _token_dim(batch_first)
    return base.scatter_(dim, places, 0) if y is None else base.scatter_(dim, places, y)


# -- checks ----------------------------------------------------------------------------------------------------------


def _token_dim(batch_first: bool) -> int:
    return 1 if batch_first else 0


def _shape(x: Tensor, tokens: int, batch_first: bool) -> tuple[int, ...]:
    dim = _token_dim(batch_first)
    return (*x.shape[:dim], tokens, *x.shape[dim + 1 :])


def _wide_index(index: Tensor, x: Tensor, batch_first: bool) -> Tensor:
    places = (index if batch_first else index.t()).long()
    places = places.reshape(*places.shape, *(1 for _ in x.shape[2:]))
    return places.expand(*places.shape[:2], *x.shape[2:])


def _check(where: str, x: Tensor, index: Tensor, batch_first: bool) -> None:
    order = "[B, S, ...]" if batch_first else "[S, B, ...]"
    if x.dim() < 2:
        msg = f"{where}: tokens have shape {tuple(x.shape)}; expected {order}"
        raise ValueError(msg)
    if index.dtype not in _INDEX_TAGS:
        msg = f"{where}: index has dtype {index.dtype}; use int32 or int64"
        raise ValueError(msg)
    batch = x.shape[1 - _token_dim(batch_first)]
    if index.dim() != 2 or index.shape[0] != batch:
        msg = f"{where}: index has shape {tuple(index.shape)} for tokens {tuple(x.shape)}; expected [{batch}, K]"
        raise ValueError(msg)
    if index.device != x.device:
        msg = f"{where}: index is on {index.device} and tokens are on {x.device}; put both on one device"
        raise ValueError(msg)


def _check_put(where: str, y: Tensor, index: Tensor, into: Tensor, batch_first: bool) -> None:
    _check(where, into, index, batch_first)
    wanted = _shape(into, index.shape[1], batch_first)
    if y.shape != wanted or y.device != into.device:
        msg = f"{where}: y has shape {tuple(y.shape)} on {y.device}; index and into need {wanted} on {into.device}"
        raise ValueError(msg)


def _check_places(index: Tensor, tokens: int) -> None:
    """Refuse places that are not there or named twice; on a device only if the environment asks for it."""
    if not index.numel() or (index.device.type != "cpu" and os.environ.get(CHECK_VARIABLE, "") != "1"):
        return
    is_ascending = bool((index[:, 1:] > index[:, :-1]).all())
    ordered = index if is_ascending else index.sort(dim=1).values
    low, high = int(ordered[:, 0].min()), int(ordered[:, -1].max())
    if low < 0 or high >= tokens:
        wrong = low if low < 0 else high
        msg = f"index names place {wrong} of a sample with {tokens} tokens; places are 0 to {tokens - 1}"
        raise ValueError(msg)
    twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if twice.numel():
        sample, at = twice[0].tolist()
        msg = f"index names place {int(ordered[sample, at])} of sample {sample} twice; places have to be distinct"
        raise ValueError(msg)


# -- operators -------------------------------------------------------------------------------------------------------


def _base(y: Tensor | None, into: Tensor | None, tokens: int, batch_first: bool) -> Tensor:
    """An empty result. Raises ValueError: dtypes differ."""
    given = [x for x in (into, y) if x is not None]
    like = given[0]
    if given[-1].dtype != like.dtype:
        msg = f"scatter: y has dtype {given[-1].dtype} and into {like.dtype}; convert one of them"
        raise ValueError(msg)
    return like.new_empty(_shape(like, tokens, batch_first))


def _fake_gather(x: Tensor, index: Tensor, batch_first: bool) -> Tensor:
    return x.new_empty(_shape(x, index.shape[1], batch_first))


def _fake_merge(y: Tensor | None, into: Tensor | None, index: Tensor, tokens: int, batch_first: bool) -> Tensor:
    return _base(y, into, tokens, batch_first)


def _run_gather(x: Tensor, index: Tensor, batch_first: bool) -> Tensor:
    tokens, picked = x.shape[_token_dim(batch_first)], index.shape[1]
    _check_places(index, tokens)
    runs = launcher.for_tensor(x)
    module = _host_loops(x) if runs is None else None
    if module is not None:
        return _copied(
            module.pick, x.new_empty(_shape(x, picked, batch_first)), (x,), _rows(index, tokens, batch_first)
        )
    if runs is None:
        return gather_reference(x, index, batch_first)
    x, index = x.contiguous(), index.contiguous()
    out = x.new_empty(_shape(x, picked, batch_first))
    if out.numel():
        width, units = _units([x, out], index)
        numbers = _numbers(index.numel(), index.shape[0], tokens, picked, units, batch_first)
        name = f"token_gather_{width}_{_INDEX_TAGS[index.dtype]}"
        pointers = (out.data_ptr(), x.data_ptr(), index.data_ptr())
        runs.launch(name, *_layout(index.numel(), units), *pointers, numbers)
    return out


def _run_merge(y: Tensor | None, into: Tensor | None, index: Tensor, tokens: int, batch_first: bool) -> Tensor:
    _check_places(index, tokens)
    out = _base(y, into, tokens, batch_first)
    runs = launcher.for_tensor(out)
    module = _host_loops(out) if runs is None else None
    if module is not None:
        rows = _rows(index, tokens, batch_first)
        sources = torch.full((index.shape[0] * tokens,), -1)
        sources[rows] = torch.arange(len(rows))
        return _copied(module.merge, out, (y, into), sources)
    if runs is None:
        return merge_reference(y, into, index, tokens, batch_first)
    if out.numel():
        held = [x.contiguous() for x in (y, into) if x is not None]
        sources = _sources(runs, index.contiguous(), tokens, batch_first)
        width, units = _units([*held, out], index, rows=sources.numel())
        numbers = _numbers(sources.numel(), index.shape[0], tokens, index.shape[1], units, batch_first)
        ready = iter(held)
        places = [0 if x is None else next(ready).data_ptr() for x in (y, into)]
        layout = _layout(sources.numel(), units)
        runs.launch(f"token_merge_{width}", *layout, out.data_ptr(), *places, sources.data_ptr(), numbers)
    return out


def _host_loops(x: Tensor) -> ModuleType | None:
    """The compiled loops, or None: the reference runs instead."""
    return status.compiled("permute") if x.device.type == "cpu" else None


def _rows(index: Tensor, tokens: int, batch_first: bool) -> Tensor:
    """For each row that is picked, in order, the row of the batch."""
    samples = torch.arange(index.shape[0]).unsqueeze(1)
    return (samples * tokens + index).reshape(-1) if batch_first else (index * len(samples) + samples).t().reshape(-1)


def _copied(run: Callable[..., None], out: Tensor, tensors: tuple[Tensor | None, ...], index: Tensor) -> Tensor:
    """`out`, whose rows a compiled loop has copied from rows of tensors."""
    if out.numel():
        held = [None if x is None else x.contiguous() for x in tensors]  # alive until the loop has ended
        addresses = [0 if x is None else x.data_ptr() for x in held]
        sizes = len(index), 1, 0, out.numel() // len(index), out.element_size()
        run(out.data_ptr(), *addresses, index.data_ptr(), sizes, torch.get_num_threads())
    return out


def _sources(runs: Launcher, index: Tensor, tokens: int, batch_first: bool) -> Tensor:
    """For each row of the batch the row that is put there, or -1."""
    batch, picked = index.shape
    sources = torch.full((batch * tokens,), -1, dtype=torch.int64, device=index.device)
    if index.numel():
        numbers = _numbers(index.numel(), batch, tokens, picked, 0, batch_first)
        grid, threads = (-(-index.numel() // _THREADS), 1, 1), (_THREADS, 1, 1)
        name = f"token_sources_{_INDEX_TAGS[index.dtype]}"
        runs.launch(name, grid, threads, sources.data_ptr(), index.data_ptr(), numbers)
    return sources


def _numbers(rows: int, batch: int, tokens: int, picked: int, units: int, batch_first: bool) -> bytes:
    return struct.pack("QQQQQI4x", rows, batch, tokens, picked, units, batch_first)


def _units(tensors: list[Tensor], index: Tensor, rows: int | None = None) -> tuple[int, int]:
    """Bytes of the widest unit in which all rows can be copied, and how many make a row."""
    out = tensors[-1]
    nbytes = out.numel() // (index.numel() if rows is None else rows) * out.element_size()
    width = next(w for w in _WIDTHS if nbytes % w == 0 and all(x.data_ptr() % w == 0 for x in tensors))
    return width, nbytes // width


def _layout(rows: int, units: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Blocks and threads: at least a warp along a row that has so many units, and four units to a thread."""
    wanted = max(min(units, _WARP), -(-units // _AHEAD))
    along = min(_THREADS, 1 << (wanted - 1).bit_length())
    rows_of_block = _THREADS // along
    return (-(-rows // rows_of_block), 1, 1), (along, rows_of_block, 1)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
    x, index, batch_first = inputs
    ctx.save_for_backward(index)
    ctx.tokens, ctx.batch_first = x.shape[_token_dim(batch_first)], batch_first


def _grad_gather(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    (index,) = ctx.saved_tensors
    return None if grad is None else _merge(grad, None, index, ctx.tokens, ctx.batch_first), None, None


def _save_merge(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
    _, _, index, tokens, batch_first = inputs
    ctx.save_for_backward(index)
    ctx.tokens, ctx.batch_first = tokens, batch_first


def _grad_merge(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    if grad is None:
        return None, None, None, None, None
    needs_y, needs_into = ctx.needs_input_grad[:2]
    dy = _gather(grad, index, ctx.batch_first) if needs_y else None
    dinto = _merge(None, grad, index, ctx.tokens, ctx.batch_first) if needs_into else None
    return dy, dinto, None, None, None


_gather = ops.define("token_gather(Tensor x, Tensor index, bool batch_first) -> Tensor", _run_gather, _fake_gather)
_merge = ops.define(
    "token_merge(Tensor? y, Tensor? into, Tensor index, int tokens, bool batch_first) -> Tensor",
    _run_merge,
    _fake_merge,
    autocast=("y", "into"),
)
ops.differentiate(_gather, _save_gather, _grad_gather)
ops.differentiate(_merge, _save_merge, _grad_merge)


class _Take(torch.autograd.Function):
    """The gradient of `rest` is that of the result of `_Put` as a whole; tokens that were taken are replaced in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        ctx.set_materialize_grads(False)
        ctx.tokens, ctx.batch_first = x.shape[_token_dim(batch_first)], batch_first
        return _gather(x, index, batch_first), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_taken: Tensor | None, of_rest: Tensor | None) -> tuple[Tensor | None, None, None]:
        (index,) = ctx.saved_tensors
        if of_taken is None and of_rest is None:
            return None, None, None
        return _merge(of_taken, of_rest, index, ctx.tokens, ctx.batch_first), None, None


class _Put(torch.autograd.Function):
    """The other half of `_Take`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, index: Tensor, rest: Tensor, batch_first: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.batch_first = batch_first
        merged: Tensor = _merge(y, rest, index, rest.shape[_token_dim(batch_first)], batch_first)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (index,) = ctx.saved_tensors
        needs_y, _, needs_rest, _ = ctx.needs_input_grad
        dy = _gather(grad, index, ctx.batch_first) if needs_y else None
        return dy, None, grad if needs_rest else None, None
