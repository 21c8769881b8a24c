"""Layouts of block-sparse attention as lists of tiles: query blocks that see the same number of key blocks.

A tile is some neighbouring query blocks with the key blocks that any of them sees. Neighbours with equal keys are one
tile; small neighbours with nearly equal keys are one as well, and the pairs they do not share are masked, because the
kernels are slow with few queries at once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mpispeed.base.errors import UsageError

QUERIES_WANTED = 64
"""Tokens: the backward of torch's CPU kernel took 2.5 times as long for the same work in tiles of 16 queries, and a
sixth less in tiles of 128."""

QUERIES_AT_MOST = 512
"""Tokens of a tile of equal neighbours; more would bound the memory of a call worse and gain nothing."""

WASTE = 1.75
"""Tiles of unequal neighbours compute up to this many times the pairs of the layout."""


class Tiles(NamedTuple):
    """Tiles of one shape.

    Attributes:
        height: query blocks of a tile.
        rows: [n], first query block of each tile.
        columns: [n, width], key blocks of each tile, ascending.
        present: [n, height, width], which pairs the layout has; None: all.
        is_run: for each tile whether its columns are neighbours without a gap.
        is_crossed: whether a tile touches the diagonal, for causal lists; else False.
    """

    height: int
    rows: Tensor
    columns: Tensor
    present: Tensor | None
    is_run: tuple[bool, ...]
    is_crossed: bool

    def to(self, device: torch.device) -> Tiles:
        """The same tiles with their tensors on `device`."""
        present = None if self.present is None else self.present.to(device)
        return self._replace(rows=self.rows.to(device), columns=self.columns.to(device), present=present)


class Pattern(NamedTuple):
    """Heads that share a layout (None: all heads), and its tiles."""

    heads: Tensor | None
    tiles: tuple[Tiles, ...]


class BlockList:
    """The key blocks each query block sees, per head or for all heads.

    Memory is linear in the blocks that are there. Made once by `of`, used by `attend_blocks`.

    Attributes:
        block: tokens of a block.
        heads: heads the layout tells apart; 1: all heads are alike.
        query_blocks: number of query blocks.
        key_blocks: number of key blocks.
        count: blocks that are there, of all `heads` together.
    """

    def __init__(self, layout: Tensor, block: int, *, is_causal: bool = False) -> None:
        self.block = block
        self.heads, self.query_blocks, self.key_blocks = layout.shape
        self.count = int(layout.sum())
        self.is_causal = is_causal
        self._layout = layout
        self._placed: dict[torch.device, tuple[Pattern, ...]] = {}

    @classmethod
    def of(cls, layout: Tensor, block: int) -> BlockList:
        """A list from a layout.

        Args:
            layout: [heads or 1, query blocks, key blocks] or [query blocks, key blocks] of 0 and 1.
            block: tokens of a block, at least 1.

        Raises:
            UsageError: the layout has other dims or values, or the block no size.
        """
        layout = layout.detach().cpu()
        if layout.dim() == 2:
            layout = layout.unsqueeze(0)
        if layout.dim() != 3 or block < 1:
            msg = f"a layout is [heads or 1, query blocks, key blocks] with block >= 1, not {tuple(layout.shape)} "
            msg += f"with block {block}"
            raise UsageError(msg)
        if not bool(((layout == 0) | (layout == 1)).all()):
            wrong = layout[(layout != 0) & (layout != 1)][0].item()
            msg = f"a layout holds 0 and 1, not {wrong}"
            raise UsageError(msg)
        return cls(layout.bool(), block)

    @property
    def layout(self) -> Tensor:
        """[heads, query blocks, key blocks], bool, on the CPU; not to be changed."""
        return self._layout

    @functools.cached_property
    def causal(self) -> BlockList:
        """The same list without blocks above the diagonal; blocks on it are causal by token."""
        return BlockList(self._layout.tril(), self.block, is_causal=True)

    @functools.cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """Heads with equal layouts together, each with its tiles, on the CPU."""
        distinct, inverse = torch.unique(self._layout, dim=0, return_inverse=True)
        if len(distinct) == 1:
            return (Pattern(None, _tiles(distinct[0], self.block, self.is_causal)),)
        return tuple(
            Pattern((inverse == number).nonzero().flatten(), _tiles(layout, self.block, self.is_causal))
            for number, layout in enumerate(distinct)
        )

    def on(self, device: torch.device) -> tuple[Pattern, ...]:
        """`patterns` with the tensors on `device`, kept from the first call on."""
        if device not in self._placed:
            self._placed[device] = tuple(
                Pattern(
                    None if heads is None else heads.to(device),
                    tuple(group.to(device) for group in tiles),
                )
                for heads, tiles in self.patterns
            )
        return self._placed[device]


class _Tile(NamedTuple):
    height: int
    row: int
    columns: Tensor
    present: Tensor | None
    is_run: bool
    is_crossed: bool


def _tiles(layout: Tensor, block: int, is_causal: bool) -> tuple[Tiles, ...]:
    """The tiles of one layout, those of one shape together."""
    groups: dict[tuple[int, int, bool, bool], list[_Tile]] = {}
    for tile in _cut(layout, block, is_causal):
        key = (tile.height, len(tile.columns), tile.present is not None, tile.is_crossed)
        groups.setdefault(key, []).append(tile)
    found = []
    for (height, _, is_partial, is_crossed), tiles in groups.items():
        present = [tile.present for tile in tiles if tile.present is not None]
        found.append(
            Tiles(
                height,
                torch.tensor([tile.row for tile in tiles]),
                torch.stack([tile.columns for tile in tiles]),
                torch.stack(present) if is_partial else None,
                tuple(tile.is_run for tile in tiles),
                is_crossed,
            )
        )
    return tuple(found)


def _cut(layout: Tensor, block: int, is_causal: bool) -> list[_Tile]:
    counts = layout.sum(1).tolist()
    is_same = [False, *(layout[1:] == layout[:-1]).all(1).tolist()]  # as the row before
    wanted, most = max(1, QUERIES_WANTED // block), max(1, QUERIES_AT_MOST // block)
    found: list[_Tile] = []
    row = 0
    while row < len(counts):
        height = 1
        while row + height < len(counts) and height < most and is_same[row + height]:
            height += 1
        together = min(wanted, len(counts) - row)
        if height < together:
            union = layout[row : row + together].any(0)
            if int(union.sum()) * together <= WASTE * sum(counts[row : row + together]):
                height = together
        if any(counts[row : row + height]):
            found.append(_tile(layout, row, height, is_causal))
        row += height
    return found


def _tile(layout: Tensor, row: int, height: int, is_causal: bool) -> _Tile:
    rows = layout[row : row + height]
    columns = rows.any(0).nonzero().flatten()
    present = rows[:, columns]
    first, last = int(columns[0]), int(columns[-1])
    is_whole = bool(present.all())
    is_run = last - first + 1 == len(columns)
    return _Tile(height, row, columns, None if is_whole else present, is_run, is_causal and last >= row)
