"""Block-sparse attention, by torch's compiled flex_attention (`flex`) or by the kernels for dense attention.

The latter take tiles with gathered keys, many in one call. Gathered keys of a call stay within a bound that fits the
caches, in buffers that are used again: fresh memory for all of them would cost more time than the attention itself.
Memory is linear in queries, keys and blocks.

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019 (attention by blocks).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention import flex
from mpispeed.nn.attention.block_list import BlockList, Tiles
from mpispeed.nn.attention.core import as_autocast, check
from mpispeed.nn.attention.kernels import partial, partial_backward, wide

GATHERED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Of gathered keys in one call; on CPU they stay in the caches."""

TILES_AT_MOST = 1 << 15
"""Of one call: a grid of CUDA has fewer than 2^16 blocks along the batch."""


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockList,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Differentiable attention over the blocks of a list; what is outside has probability 0.

    Args:
        q: [B, h, S, d], S = query blocks x block.
        k: [B, h_kv, S_k, d], S_k = key blocks x block; h is a multiple of h_kv.
        v: as `k`.
        blocks: the layout; for one head or for h.
        scale: of the scores; None: 1 / sqrt(d).
        mask: added to the scores, [S, S_k] or what broadcasts to [B, h, S, S_k]; no gradient.
        key_mask: added to the scores of keys, [B, S_k]; no gradient.
        is_causal: no token sees a later one: blocks above the diagonal are dropped, those on it are causal inside.

    Returns:
        [B, h, S, d]; zeros for queries without any key.

    Raises:
        UsageError: shapes or dtypes do not fit each other or the layout.
    """
    q, k, v = as_autocast(q, k, v)
    check(q, k, v)
    _check_layout(q, k, blocks, mask, key_mask, is_causal)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    blocks = blocks.causal if is_causal else blocks
    if flex.serves(q, k, mask):
        compiled = flex.attend(q, k, v, blocks, scale, mask, key_mask)
        if compiled is not None:
            return compiled
    out: Tensor = _AttendBlocks.apply(q, k, v, blocks, scale, mask, key_mask)
    return out


def _check_layout(
    q: Tensor, k: Tensor, blocks: BlockList, mask: Tensor | None, key_mask: Tensor | None, is_causal: bool
) -> None:
    msg = ""
    lengths = (blocks.query_blocks * blocks.block, blocks.key_blocks * blocks.block)
    if lengths != (q.shape[2], k.shape[2]):
        msg = f"the layout has {blocks.query_blocks} x {blocks.key_blocks} blocks of {blocks.block} tokens, "
        msg += f"{lengths[0]} queries and {lengths[1]} keys, not {q.shape[2]} and {k.shape[2]}; pad to whole blocks"
    elif blocks.heads not in (1, q.shape[1]):
        msg = f"the layout is for {blocks.heads} heads, and q has {q.shape[1]}"
    elif is_causal and lengths[0] != lengths[1]:
        msg = f"causal attention needs as many keys as queries, not {lengths[1]} and {lengths[0]}"
    elif key_mask is not None and key_mask.shape != (q.shape[0], k.shape[2]):
        msg = f"key_mask is [B, S_k] = {(q.shape[0], k.shape[2])}, not {tuple(key_mask.shape)}"
    elif mask is not None:
        whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        is_fitting = 2 <= mask.dim() <= 4 and mask.shape[-2:] == whole[2:]
        for found, wanted in zip(reversed(mask.shape), reversed(whole), strict=False):
            is_fitting &= found in (1, wanted)
        if not is_fitting:
            msg = f"mask is [S, S_k] or broadcasts to [B, h, S, S_k] = {whole}, not {tuple(mask.shape)}"
    if msg:
        raise UsageError(msg)


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: BlockList,
        scale: float,
        mask: Tensor | None,
        key_mask: Tensor | None,
    ) -> Tensor:
        out, lse = _run(q, k, v, blocks, scale, mask, key_mask)
        ctx.save_for_backward(q, k, v, out, lse, mask, key_mask)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask, key_mask = ctx.saved_tensors
        found = _run_backward(grad, q, k, v, out, lse, ctx.blocks, ctx.scale, mask, key_mask)
        return *found, None, None, None, None


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockList,
    scale: float,
    mask: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    patterns = blocks.on(q.device)
    if patterns[0].heads is None:
        return _Lanes(q, k, v, blocks, mask, key_mask).forward(patterns[0].tiles, scale)
    k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    for heads, tiles in patterns:
        lanes = _Lanes(q[:, heads], k[:, heads], v[:, heads], blocks, _of_heads(mask, heads), key_mask)
        out[:, heads], lse[:, heads] = lanes.forward(tiles, scale)
    return out, lse


def _run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: BlockList,
    scale: float,
    mask: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    patterns = blocks.on(q.device)
    if patterns[0].heads is None:
        return _Lanes(q, k, v, blocks, mask, key_mask).backward(patterns[0].tiles, scale, grad, out, lse)
    groups = k.shape[1]
    k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for heads, tiles in patterns:
        lanes = _Lanes(q[:, heads], k[:, heads], v[:, heads], blocks, _of_heads(mask, heads), key_mask)
        found = lanes.backward(tiles, scale, grad[:, heads], out[:, heads], lse[:, heads])
        dq[:, heads], dk[:, heads], dv[:, heads] = found
    if groups != q.shape[1]:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2, dtype=wide(x.dtype)).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _of_heads(mask: Tensor | None, heads: Tensor | None) -> Tensor | None:
    if mask is None or heads is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    return mask.index_select(-3, heads)


class _Call(NamedTuple):
    """One call of a kernel: tiles `first` to `last` of a group, for some lanes."""

    tiles: Tiles
    first: int
    last: int
    lanes: slice  # of queries
    key_lanes: slice
    is_run: bool

    @property
    def rows(self) -> Tensor:
        """Query blocks of all tiles, one after the other."""
        rows = self.tiles.rows[self.first : self.last]
        if self.tiles.height == 1:
            return rows
        return (rows.unsqueeze(1) + torch.arange(self.tiles.height, device=rows.device)).flatten()

    @property
    def columns(self) -> Tensor:
        """[tiles, width]."""
        return self.tiles.columns[self.first : self.last]


class _Lanes:
    """Heads of all rows of the batch side by side, as blocks; one layout for all of them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockList, mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        self.batch, self.heads, _, self.width = q.shape
        self.block, self.is_causal = blocks.block, blocks.is_causal
        self.key_shape = k.shape
        self.q, self.k, self.v = (self.as_blocks(x) for x in (q, k, v))
        self.mask, self.key_mask = mask, key_mask
        self.buffers: dict[str, Tensor] = {}

    def as_blocks(self, x: Tensor) -> Tensor:
        """[B, h, S, d] as [B * h, blocks, block * d]."""
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2] // self.block, self.block * x.shape[3])

    def forward(self, tiles: tuple[Tiles, ...], scale: float) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(self.q)
        lse = self.q.new_full((*self.q.shape[:2], self.block), -torch.inf, dtype=wide(self.q.dtype))
        for call in self.calls(tiles):
            k, v = (self.gathered(name, x, call) for name, x in (("k", self.k), ("v", self.v)))
            rows = call.rows
            part, part_lse = partial(self.tiled(self.q, call, rows), k, v, scale=scale, mask=self.masks(call))
            out[call.lanes, rows] = self.untiled(part)
            lse[call.lanes, rows] = part_lse.transpose(0, 1).reshape(part.shape[1], -1, self.block)
        shape = (self.batch, self.heads, -1)
        return out.view(*shape, self.width), lse.view(shape)

    def backward(
        self, tiles: tuple[Tiles, ...], scale: float, grad: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, out = self.as_blocks(grad), self.as_blocks(out)
        lse = lse.reshape(*self.q.shape[:2], self.block)
        dq = torch.zeros_like(self.q)
        # tokens before heads: the kernel of the CPU gives gradients like that, and they are added without another copy
        shape = (self.k.shape[1], self.block, self.k.shape[0], self.width)
        dk, dv = (torch.zeros(shape, dtype=wide(self.k.dtype), device=self.k.device) for _ in "kv")
        for call in self.calls(tiles):
            k, v = (self.gathered(name, x, call) for name, x in (("k", self.k), ("v", self.v)))
            rows = call.rows
            of_queries = [self.tiled(x, call, rows) for x in (grad, self.q, out)]
            part_lse = lse[call.lanes].index_select(1, rows).view(-1, call.last - call.first, of_queries[0].shape[2])
            part, *of_keys = partial_backward(
                of_queries[0],
                of_queries[1],
                k,
                v,
                of_queries[2],
                part_lse.transpose(0, 1),
                scale=scale,
                mask=self.masks(call),
            )
            dq[call.lanes, rows] = self.untiled(part)
            for total, found in zip((dk, dv), of_keys, strict=True):
                self.scatter(total, found, call)
        dk, dv = (x.to(self.k.dtype).view(-1, *self.key_shape[:2], self.width).permute(1, 2, 0, 3) for x in (dk, dv))
        return dq.view(self.batch, self.heads, -1, self.width), dk, dv

    def calls(self, groups: tuple[Tiles, ...]) -> Iterator[_Call]:
        """What one call of a kernel does at a time."""
        lanes = self.k.shape[0]
        grouped = self.q.shape[0] // lanes
        limit = GATHERED_BYTES.get(self.q.device.type, GATHERED_BYTES["cuda"])
        threads = torch.get_num_threads() if self.q.device.type == "cpu" else 1
        for tiles in groups:
            per_lane = tiles.columns.shape[1] * self.k.shape[2] * self.k.element_size()
            # a thread has one head of one tile; two for each let them end together
            at_once = min(lanes, max(limit // per_lane, -(-2 * threads // grouped), 1))
            step = max(limit // (per_lane * at_once), -(-2 * threads // (at_once * grouped)), 1)
            for low in range(0, lanes, at_once):
                high = min(low + at_once, lanes)
                for first in range(0, len(tiles.rows), step):
                    last = min(first + step, len(tiles.rows))
                    is_run = last - first == 1 and tiles.is_run[first]
                    yield _Call(tiles, first, last, slice(low * grouped, high * grouped), slice(low, high), is_run)

    def tiled(self, x: Tensor, call: _Call, rows: Tensor) -> Tensor:
        """Query blocks as [tiles, lanes, tokens, d]."""
        found = x[call.lanes].index_select(1, rows)
        return found.view(found.shape[0], call.last - call.first, -1, self.width).transpose(0, 1)

    def untiled(self, x: Tensor) -> Tensor:
        """Back to [lanes, blocks, block * d]."""
        return x.transpose(0, 1).reshape(x.shape[1], -1, self.block * self.width)

    def gathered(self, name: str, x: Tensor, call: _Call) -> Tensor:
        """Key blocks as [tiles, lanes, tokens, d], in a buffer that the next call uses again, or as a view."""
        x = x[call.key_lanes]
        if call.is_run:
            begin, width = int(call.columns[0, 0]), call.columns.shape[1]
            return x[:, begin : begin + width].reshape(1, x.shape[0], -1, self.width)
        columns = call.columns.flatten()
        wanted = x.shape[0] * len(columns) * x.shape[2]
        if name not in self.buffers or self.buffers[name].numel() < wanted:
            self.buffers[name] = x.new_empty(wanted)
        room = self.buffers[name][:wanted].view(x.shape[0], len(columns), x.shape[2])
        torch.index_select(x, 1, columns, out=room)
        return room.view(x.shape[0], call.last - call.first, -1, self.width).transpose(0, 1)

    def scatter(self, total: Tensor, found: Tensor, call: _Call) -> None:
        """Adds gradients of gathered key blocks to those of all."""
        total = total[:, :, call.key_lanes]
        found = found.transpose(1, 2).reshape(-1, *total.shape[1:]).to(total.dtype)
        if call.is_run:
            begin = int(call.columns[0, 0])
            total[begin : begin + found.shape[0]] += found
        else:
            total.index_add_(0, call.columns.flatten(), found)

    def masks(self, call: _Call) -> Tensor | None:
        """All that hides or weighs pairs of these tiles, [tiles, lanes or 1, queries or 1, keys], or None."""
        found: Tensor | None = None
        for part in (self.allowed(call), self.of_keys(call), self.of_pairs(call)):
            if part is not None:
                found = part if found is None else found + part
        return found

    def allowed(self, call: _Call) -> Tensor | None:
        """-inf for pairs that the layout lacks and for later keys of a causal list."""
        tiles, block = call.tiles, self.block
        is_hidden: Tensor | None = None
        if tiles.present is not None:
            is_hidden = ~tiles.present[call.first : call.last]
            is_hidden = is_hidden.repeat_interleave(block, 1).repeat_interleave(block, 2)
        if tiles.is_crossed:
            token = torch.arange(block, device=call.columns.device)
            keys = (call.columns.unsqueeze(-1) * block + token).flatten(1)
            queries = (call.rows.unsqueeze(-1) * block + token).view(len(keys), -1)
            is_later = keys.unsqueeze(1) > queries.unsqueeze(2)
            is_hidden = is_later if is_hidden is None else is_hidden | is_later
        if is_hidden is None:
            return None
        mask = torch.zeros(is_hidden.shape, dtype=wide(self.q.dtype), device=is_hidden.device)
        return mask.masked_fill_(is_hidden, -torch.inf).unsqueeze(1)

    def of_keys(self, call: _Call) -> Tensor | None:
        """The mask of keys, for each lane."""
        if self.key_mask is None:
            return None
        blocks = self.key_mask.to(wide(self.q.dtype)).view(self.batch, -1, self.block)
        found = blocks[:, call.columns].flatten(2).transpose(0, 1).unsqueeze(2)  # [tiles, B, 1, keys]
        return found if self.batch == 1 else found.repeat_interleave(self.heads, 1)[:, call.lanes]

    def of_pairs(self, call: _Call) -> Tensor | None:
        """The mask of pairs, for each lane."""
        if self.mask is None:
            return None
        mask = self.mask.expand(*(1,) * (4 - self.mask.dim()), *self.mask.shape)
        lanes = (self.batch, self.heads) if mask.shape[0] * mask.shape[1] > 1 else (1, 1)
        blocks = mask.unflatten(3, (-1, self.block)).unflatten(2, (-1, self.block))
        rows = call.rows.view(-1, call.tiles.height)
        found = blocks[:, :, rows.unsqueeze(2), :, call.columns.unsqueeze(1)]  # [tiles, height, width, b, h, q, k]
        found = found.permute(0, 3, 4, 1, 5, 2, 6).flatten(5, 6).flatten(3, 4)
        found = found.expand(-1, *lanes, -1, -1).flatten(1, 2).to(wide(self.q.dtype))
        return found if lanes == (1, 1) else found[:, call.lanes]
