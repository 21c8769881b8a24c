"""Block-sparse attention on CUDA by torch's flex_attention, compiled: one kernel for the pairs of all blocks.

The kernel goes over tiles of 128 x 128 tokens, so blocks of other sizes are looked up inside of tiles that they do not
fill. One compilation serves one shape: the kernel is faster when lengths are constants, and a model has few of them.
Shapes beyond `SHAPES_AT_MOST`, and those that cannot be compiled, are left to the tiles with gathered keys.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from mpispeed.nn.attention.block_list import BlockList

TILE = 128
"""Tokens; the least that the backward kernels of all devices take."""

WIDTHS = range(16, 257)
"""Elements of a head that the kernels take."""

SHAPES_AT_MOST = 32
"""Compiled in a process; each takes seconds."""

IS_WANTED = True
"""False: nothing is served, for tests and measurements of the other way."""

Change = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Visits(NamedTuple):
    """Lists of the tiles that each tile sees, those with hidden pairs and the full ones apart; int32.

    Attributes:
        counts: [1, heads, rows] of partial tiles.
        columns: [1, heads, rows, most] ascending, zeros behind the last.
        full_counts: as `counts`, of full tiles.
        full_columns: as `columns`; the kernel wants equal shapes.
    """

    counts: Tensor
    columns: Tensor
    full_counts: Tensor
    full_columns: Tensor


def serves(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether the compiled kernel takes such queries, keys and masks of pairs, as far as known without compiling."""
    if not IS_WANTED or q.device.type != "cuda" or not torch.version.cuda:
        return False
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or q.shape[-1] not in WIDTHS:
        return False
    # in 16 bits torch's tiles with a mask of pairs beside them do not fit the shared memory of an H200
    if mask is not None and q.dtype != torch.float32:
        return False
    # fewer queries than a tile would take another kernel of torch's, for decoding
    if not q.numel() or not k.numel() or q.shape[2] < TILE or not _is_triton_there(q.device):
        return False
    if torch.compiler.is_compiling() or torch._dynamo.config.disable:
        return False
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    return not is_in_torch_dispatch_mode()  # torch compiles nothing under a mode, and would make all scores


@functools.cache
def _is_triton_there(device: torch.device) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device)[0] >= 8


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockList, scale: float, mask: Tensor | None, key_mask: Tensor | None
) -> Tensor | None:
    """Differentiable attention over the blocks of a list, where `serves` says so.

    Args:
        q: [B, h, S, d].
        k: [B, h_kv, S_k, d].
        v: as `k`.
        blocks: the list, `causal` taken already.
        scale: of the scores.
        mask: added to the scores, as in `attend_blocks`.
        key_mask: added to the scores, [B, S_k].

    Returns:
        [B, h, S, d]; None where this shape is not compiled, and has to be computed in another way.
    """
    q, k, v = (x.contiguous() if 0 in x.stride() else x for x in (q, k, v))
    tiles, change = block_mask(blocks, q.device), change_of(q, mask, key_mask)
    of_masks = None if mask is None else mask.shape, key_mask is not None
    key = _shape((q, k, v), tiles, scale, blocks.block, blocks.is_causal, of_masks)
    if key not in _IS_COMPILED:
        if len(_IS_COMPILED) >= SHAPES_AT_MOST:
            return None
        _IS_COMPILED[key] = _try(q, k, v, tiles, change, scale)
    return _call(q, k, v, tiles, change, scale) if _IS_COMPILED[key] else None


_IS_COMPILED: dict[tuple[Any, ...], bool] = {}


def _shape(leaves: tuple[Tensor, ...], tiles: Any, *constants: object) -> tuple[Any, ...]:
    """All that the compiler takes for constant."""
    of_tensors = [(x.shape, x.stride(), x.requires_grad) for x in leaves]
    where = leaves[0].device, leaves[0].dtype, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return *of_tensors, tiles.kv_indices.shape, tiles.q_indices.shape, *where, *constants


def _try(q: Tensor, k: Tensor, v: Tensor, tiles: Any, change: Change | None, scale: float) -> bool:
    """Compiles forward and backward, here, where torch's warnings about itself are kept from the caller."""
    is_differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    q, k, v = (x.detach().requires_grad_(x.requires_grad) for x in (q, k, v))
    try:
        # what is saved here is nobody else's: not of a checkpoint around this, say
        with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            warnings.simplefilter("ignore")
            out = _call(q, k, v, tiles, change, scale)
            if is_differentiated:
                torch.autograd.grad(out, [x for x in (q, k, v) if x.requires_grad], torch.zeros_like(out))
    except Exception as error:  # whatever a compiler may say; the other way is slower and as exact
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        msg = f"torch cannot compile flex_attention for q {tuple(q.shape)} {q.dtype} here ({reason}); block-sparse "
        msg += "attention of this shape gathers keys instead, which is slower"
        warnings.warn(msg, stacklevel=3)
        return False
    return True


def _same(x: Any) -> Any:
    return x


def _call(q: Tensor, k: Tensor, v: Tensor, tiles: Any, change: Change | None, scale: float) -> Tensor:
    # torch gives a function up after 8 compilations; ours are counted by `SHAPES_AT_MOST`
    limits = torch._dynamo.config.patch(recompile_limit=8 * SHAPES_AT_MOST, accumulated_recompile_limit=1 << 16)
    with limits, torch.autocast(q.device.type, enabled=False):
        out: Tensor = _compiled()(q, k, v, tiles, change, scale, q.shape[1] != k.shape[1])
    return out


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, tiles: Any, change: Change | None, scale: float, is_grouped: bool
    ) -> Tensor:
        found: Tensor = flex_attention(q, k, v, change, tiles, scale, is_grouped)
        return found

    return torch.compile(attention, dynamic=False, fullgraph=True)


def change_of(q: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> Change | None:
    """What is done to the score of a pair, as flex_attention takes it: masks are added, in q's dtype."""
    keys = None if key_mask is None else key_mask.detach().to(q.dtype).contiguous()
    if mask is None:
        if keys is None:
            return None

        def add_keys(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + keys[row, key]

        return add_keys
    mask = mask.detach().to(q.dtype)
    pairs = mask.expand(*(1,) * (4 - mask.dim()), *mask.shape).contiguous()
    rows, heads = int(pairs.shape[0] > 1), int(pairs.shape[1] > 1)
    if keys is None:

        def add_pairs(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + pairs[row * rows, head * heads, query, key]

        return add_pairs

    def add_both(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + pairs[row * rows, head * heads, query, key] + keys[row, key]

    return add_both


_MASKS: WeakKeyDictionary[BlockList, dict[torch.device, Any]] = WeakKeyDictionary()


def block_mask(blocks: BlockList, device: torch.device) -> Any:
    """The list as torch's BlockMask, made once for a device: tiles, and what is allowed inside of partial ones."""
    kept = _MASKS.setdefault(blocks, {})
    if device not in kept:
        from torch.nn.attention.flex_attention import BlockMask

        of_queries, of_keys = (Visits(*(x.to(device) for x in visits)) for visits in tiles_of(blocks))
        lengths = blocks.query_blocks * blocks.block, blocks.key_blocks * blocks.block
        kept[device] = BlockMask(
            seq_lengths=lengths,
            kv_num_blocks=of_queries.counts,
            kv_indices=of_queries.columns,
            full_kv_num_blocks=of_queries.full_counts,
            full_kv_indices=of_queries.full_columns,
            q_num_blocks=of_keys.counts,
            q_indices=of_keys.columns,
            full_q_num_blocks=of_keys.full_counts,
            full_q_indices=of_keys.full_columns,
            BLOCK_SIZE=(TILE, TILE),
            mask_mod=_allowed(blocks, device),
        )
    return kept[device]


def _allowed(blocks: BlockList, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether the layout has a pair; False for tokens behind the last that a tile at the edge reaches."""
    block, heads = blocks.block, int(blocks.heads > 1)
    beyond = [-(-(-count * block % TILE) // block) for count in (blocks.key_blocks, blocks.query_blocks)]
    table = functional.pad(blocks.layout, (0, beyond[0], 0, beyond[1])).to(device)

    def look_up(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[head * heads, query // block, key // block]

    def look_up_causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return table[head * heads, query // block, key // block] & (query >= key)

    return look_up_causal if blocks.is_causal else look_up


def tiles_of(blocks: BlockList) -> tuple[Visits, Visits]:
    """For each tile of queries the tiles of keys it sees, and for each tile of keys those of the queries."""
    layout, block = blocks.layout, blocks.block
    # blocks in any rectangle from sums over all that begin at the first
    sums = functional.pad(layout.to(torch.int64).cumsum(1).cumsum(2), (1, 0, 1, 0))
    (top, bottom), (left, right) = (_reach(count, block) for count in layout.shape[1:])
    present = sums[:, bottom][:, :, right] - sums[:, top][:, :, right]
    present -= sums[:, bottom][:, :, left] - sums[:, top][:, :, left]
    is_seen = present > 0
    is_full = present == (bottom - top).unsqueeze(1) * (right - left)
    for count, dim in zip(layout.shape[1:], (1, 2), strict=True):
        if count * block % TILE:  # the last tile reaches beyond the tokens
            is_full.select(dim, -1).fill_(False)
    if blocks.is_causal:
        is_seen, is_full = is_seen.tril(), is_full.tril(-1)
    return _visits(is_seen & ~is_full, is_full), _visits((is_seen & ~is_full).mT, is_full.mT)


def _reach(count: int, block: int) -> tuple[Tensor, Tensor]:
    """First block of each tile, and the one after its last."""
    first = torch.arange(0, count * block, TILE)
    return first // block, ((first + TILE).clamp(max=count * block) - 1) // block + 1


def _visits(partial: Tensor, full: Tensor) -> Visits:
    """Lists of one width, a power of two, so that layouts which differ little are of one compiled shape."""
    counts = [x.sum(-1) for x in (partial, full)]
    most = max(1, *(int(x.max()) for x in counts))
    width = min(1 << (most - 1).bit_length(), partial.shape[-1])
    found: list[Tensor] = []
    for is_there, count in zip((partial, full), counts, strict=True):
        columns = is_there.int().argsort(dim=-1, descending=True, stable=True)[..., :width]
        columns = columns.masked_fill(torch.arange(width) >= count.unsqueeze(-1), 0)
        found += [x.unsqueeze(0).to(torch.int32).contiguous() for x in (count, columns)]
    return Visits(*found)
