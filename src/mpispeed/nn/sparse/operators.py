"""Products and softmax of block-sparse tensors, for scripts that build attention of their own from them.

A sparse tensor is [Z, blocks, block, block]; its blocks are those of the layout, by head, row and column. Memory is
linear in them. `SparseSelfAttention` does without: its kernels keep no scores.

Source: DeepSpeed's API reference (deepspeed.ops.sparse_attention.MatMul, Softmax).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpispeed.base.errors import UnfitValue, UnimplementedUse
from mpispeed.nn.sparse.self_attention import as_added, require_mode

MODES = ("sdd", "dsd", "dds")


class _Places:
    """The places of the blocks of a layout."""

    def __init__(self, layout: Tensor, block: int) -> None:
        if layout.dim() not in (2, 3) or block < 1:
            msg = f"a layout is [heads, rows, columns] or [rows, columns] with block >= 1, not {tuple(layout.shape)} "
            msg += f"with block {block}"
            raise UnfitValue(msg)
        self.layout = layout if layout.dim() == 3 else layout.unsqueeze(0)
        self.block = block
        self.is_shared = layout.dim() == 2
        self.heads, self.rows, self.columns = self.layout.shape
        self._found: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor]] = {}

    def on(self, device: torch.device, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Head, row and column of each block; a layout for all heads is repeated for `heads`."""
        heads = heads if self.is_shared and heads is not None else self.heads
        if heads != self.heads and not self.is_shared:
            msg = f"the layout has {self.heads} heads, and the tensor {heads}"
            raise UnfitValue(msg)
        key = (device, heads)
        if key not in self._found:
            found = self.layout.expand(heads, -1, -1).nonzero().to(device)
            self._found[key] = (found[:, 0], found[:, 1], found[:, 2])
        return self._found[key]

    def heads_of(self, sparse: Tensor) -> int:
        """Heads of a sparse tensor.

        Raises:
            UnfitValue: it has other blocks than the layout.
        """
        count = int((self.layout != 0).sum())
        blocks, *sizes = sparse.shape[-3:]
        repeats = blocks // count if count and self.is_shared else 1
        if list(sizes) != [self.block, self.block] or blocks != count * repeats or not repeats:
            msg = f"the sparse tensor is {tuple(sparse.shape)}; its last dims are {(count, self.block, self.block)}"
            raise UnfitValue(msg)
        return repeats if self.is_shared else self.heads


class MatMul:
    """A product of two matrices of which one (`dsd`, `dds`), or the result (`sdd`), is sparse.

    Letters of a mode are the result, the first and the second factor: `sdd` gives the blocks of a product of two dense
    tensors.
    """

    def __init__(self, layout: Tensor, block: int, mode: str, trans_a: bool = False, trans_b: bool = False) -> None:
        """Choose the product.

        Args:
            layout: 0 and 1, [heads, rows, columns], or [rows, columns] for all heads.
            block: tokens of a block.
            mode: "sdd", "dsd" or "dds".
            trans_a: the first factor is transposed in its last two dims; a sparse one as if its blocks were, too.
            trans_b: the same for the second.

        Raises:
            UnimplementedUse: an unknown mode.
            UnfitValue: the layout has other dims.
        """
        if mode not in MODES:
            msg = f"mode is {mode!r}; it is one of {', '.join(MODES)}"
            raise UnimplementedUse(msg)
        self.mode, self.trans_a, self.trans_b = mode, trans_a, trans_b
        self.places = _Places(layout, block)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply.

        Args:
            a: dense [Z, h, M, K] (missing first dims are added, and taken away from the result) or sparse.
            b: dense [Z, h, K, N] or sparse.

        Returns:
            Sparse, or dense [Z, h, M, N]; differentiable.

        Raises:
            UnfitValue: devices, dtypes or shapes do not fit each other or the layout.
        """
        if a.device != b.device or a.dtype != b.dtype:
            msg = f"the factors are {a.dtype} on {a.device} and {b.dtype} on {b.device}; give both alike"
            raise UnfitValue(msg)
        if max(a.dim(), b.dim()) > 4:
            msg = f"the factors have {a.dim()} and {b.dim()} dims; they have at most 4"
            raise UnfitValue(msg)
        added = 4 - max(a.dim(), b.dim())
        a, b = (x.reshape(*(1,) * (4 - x.dim()), *x.shape) for x in (a, b))
        a = a.transpose(-1, -2) if self.trans_a else a
        b = b.transpose(-1, -2) if self.trans_b else b
        found = getattr(self, "_" + self.mode)(a, b)
        return found.reshape(found.shape[added:]) if found.shape[:added] == (1,) * added else found

    def _sdd(self, a: Tensor, b: Tensor) -> Tensor:
        places, block = self.places, self.places.block
        wanted = (places.rows * block, places.columns * block)
        if (a.shape[-2], b.shape[-1]) != wanted or a.shape[-1] != b.shape[-2]:
            msg = f"a product of {tuple(a.shape[-2:])} and {tuple(b.shape[-2:])} is not one of {wanted}"
            raise UnfitValue(msg)
        heads, rows, columns = places.on(a.device, a.shape[1])
        left = a.unflatten(2, (-1, block))[:, heads, rows]
        right = b.transpose(-1, -2).unflatten(2, (-1, block))[:, heads, columns]
        return left @ right.transpose(-1, -2)

    def _dsd(self, a: Tensor, b: Tensor) -> Tensor:
        return self._sparse_dense(a, b, is_transposed=self.trans_a)

    def _dds(self, a: Tensor, b: Tensor) -> Tensor:
        turned = self._sparse_dense(b.transpose(-1, -2), a.transpose(-1, -2), is_transposed=not self.trans_b)
        return turned.transpose(-1, -2)

    def _sparse_dense(self, sparse: Tensor, dense: Tensor, *, is_transposed: bool) -> Tensor:
        places, block = self.places, self.places.block
        heads, rows, columns = places.on(dense.device, places.heads_of(sparse))
        size, inner = (places.columns, places.rows) if is_transposed else (places.rows, places.columns)
        rows, columns = (columns, rows) if is_transposed else (rows, columns)
        if dense.shape[-2] != inner * block or dense.shape[1] <= int(heads[-1:].sum()):
            msg = f"the dense factor is {tuple(dense.shape)}, and the sparse one has {inner * block} there and "
            msg += f"{int(heads[-1:].sum()) + 1} heads"
            raise UnfitValue(msg)
        parts = sparse @ dense.unflatten(2, (-1, block))[:, heads, columns]
        out = parts.new_zeros(len(parts), dense.shape[1] * size, block, dense.shape[-1])
        return out.index_add(1, heads * size + rows, parts).unflatten(1, (-1, size)).flatten(2, 3)


class Softmax:
    """Softmax over the blocks that a row has."""

    def __init__(self, layout: Tensor, block: int) -> None:
        """Choose the blocks.

        Args:
            layout: 0 and 1, [heads, rows, columns], or [rows, columns] for all heads.
            block: tokens of a block.

        Raises:
            UnfitValue: the layout has other dims.
        """
        self.places = _Places(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """Probabilities of scale * x + rpe + masks, in fp32 inside.

        Args:
            x: sparse, [Z, blocks, block, block]; it stays as it is.
            scale: of `x`.
            rpe: added, [Z, h, S, S] or what broadcasts to it; no gradient.
            key_padding_mask: [Z, S]; no gradient.
            attn_mask: [S, S]; no gradient.
            key_padding_mask_mode: "add": the mask is added; "mul": keys with 0 are not seen.
            attn_mask_mode: the same for `attn_mask`.

        Returns:
            As `x`; differentiable. Rows without a key are zeros.

        Raises:
            UnfitValue: `x` has other blocks than the layout, or a mask another dtype.
            ConfigError: an unknown mode.
        """
        for name, mask in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != x.dtype:
                msg = f"{name} is {mask.dtype}, and the scores are {x.dtype}; give both alike"
                raise UnfitValue(msg)
        places, block = self.places, self.places.block
        total = places.heads_of(x)
        heads, rows, columns = places.on(x.device, total)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        z = x.to(wide) * scale
        if rpe is not None:
            whole = rpe.detach().to(wide).expand(len(x), total, -1, -1)
            z = z + _blocks(whole, block)[:, heads, rows, columns]
        if key_padding_mask is not None:
            mode = require_mode("key_padding_mask_mode", key_padding_mask_mode)
            mask = as_added(key_padding_mask.detach().reshape(len(x), -1), mode, wide)
            z = z + mask.unflatten(1, (-1, block))[:, columns].unsqueeze(2)
        if attn_mask is not None:
            mode = require_mode("attn_mask_mode", attn_mask_mode)
            mask = as_added(attn_mask.detach().reshape(attn_mask.shape[-2:]), mode, wide)
            z = z + _blocks(mask, block)[rows, columns]
        return _normalized(z, heads * places.rows + rows, total * places.rows).to(x.dtype)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., S, S] as [..., rows, columns, block, block]."""
    return x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).transpose(-3, -2)


def _normalized(z: Tensor, row: Tensor, rows: int) -> Tensor:
    """exp(z) over its sum in each row of blocks; z [Z, blocks, block, block], `row` that of each block."""
    highest = z.detach().amax(-1)
    top = highest.new_full((len(z), rows, z.shape[2]), -torch.inf)
    top = top.scatter_reduce(1, row.view(1, -1, 1).expand_as(highest), highest, "amax")
    top = top.masked_fill(top == -torch.inf, 0.0)
    powers = (z - top[:, row].unsqueeze(-1)).exp()
    sums = powers.new_zeros(top.shape).index_add(1, row, powers.sum(-1))
    return powers / sums.masked_fill(sums == 0, 1.0)[:, row].unsqueeze(-1)
