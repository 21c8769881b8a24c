"""A linear layer in tiles used one after the other, so that only one tile has to be unsharded at a time.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC21,
section 5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from mpispeed.base.errors import UsageError


class Gather(Protocol):
    """Unshards parameters for the length of a `with` block, as `mpispeed.zero.GatheredParameters` does."""

    def __call__(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> AbstractContextManager[Any]:
        """Args: `modifier_rank` is the rank whose writes count when the block ends; None: nobody writes."""


class TiledLinear(nn.Module):
    """A linear layer as `out_splits` rows of `in_splits` smaller linear layers, `linears[row][column]`.

    A row adds up its tiles over the pieces of the input; the rows' outputs are joined. Only the last tile of a row
    has a bias. Where parameters are sharded over ranks, each tile is unsharded for its own use and resharded after it.
    With `in_splits=1` each row equals a dense layer of these rows bitwise; with more, sums
    are in another order.

    Without `init_linear` each tile starts as `linear_cls` starts a layer of the tile's size. The default of torch
    draws from a range that depends on the number of inputs, so with `in_splits > 1` it is wider than a dense layer's.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: add a bias.
        in_splits: pieces of the input, 1 to `in_features`. Sizes differ by at most one, the larger ones first.
        out_splits: pieces of the output, 1 to `out_features`, likewise.
        input_is_already_split: `forward` takes a list of `in_splits` pieces.
        combine_out_splits: join the pieces of the output; False returns them as a list.
        linear_cls: makes a tile: `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a layer whose weight and bias are copied, see `copy_params_from`.
        kwargs: passed on to `linear_cls`.

    Collective over: the ranks of `default_gather`, if that and `init_linear` are given.

    Raises:
        UsageError: (a RuntimeError) a number of pieces is out of range, or `init_linear` does not fit.
    """

    tile_depth: ClassVar[int] = 3
    """How many levels down the tiles are (linears, row, tile): each is fetched by itself where parameters rest cut."""

    default_gather: ClassVar[Gather | None] = None
    """What `copy_params_from` uses when it is given nothing; for subclasses that know how parameters rest."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = piece_sizes(in_features, in_splits, "in")
        self.out_sizes = piece_sizes(out_features, out_splits, "out")
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == last, **kwargs)
                for column, width in enumerate(self.in_sizes)
            )
            for height in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @property
    def in_parts(self) -> list[int]:
        """Bounds of the pieces of the input: 0, the end of each."""
        return [0, *itertools.accumulate(self.in_sizes)]

    @property
    def out_parts(self) -> list[int]:
        """Bounds of the pieces of the output: 0, the end of each."""
        return [0, *itertools.accumulate(self.out_sizes)]

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Apply the layer.

        Shapes: [..., in_features], or a list of pieces of it along the last dimension; returns [..., out_features],
            or a list of pieces of that.

        Raises:
            UsageError: the input is not split as the layer expects.
        """
        pieces = self._pieces(input_)
        outputs = []
        for row in self.linears:
            total = None
            for tile, piece in zip(row, pieces, strict=True):  # type: ignore[call-overload]
                total = self._add(total, tile(piece))
            outputs.append(total)
        return self._join(outputs) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Module, gather: Gather | None = None) -> None:
        """Copy weight and bias of a dense layer.

        Args:
            other: has `weight` of shape [out_features, in_features] and a `bias` exactly if this layer has one.
            gather: unshards parameters, such as `mpispeed.zero.GatheredParameters`; then the values of rank 0 count.
                One tile is unsharded at a time; a sharded `other` is unsharded throughout.

        Collective over: the ranks of `gather`, if there is one.

        Raises:
            UsageError: shapes or biases do not fit; raised before anything is copied.
        """
        gather = gather or type(self).default_gather or _already_whole
        with torch.no_grad(), gather(list(other.parameters()), None):
            weight, bias = self._checked(other)
            for row, rows in zip(self.linears, _slices(self.out_sizes), strict=True):
                for tile, columns in zip(row, _slices(self.in_sizes), strict=True):  # type: ignore[call-overload]
                    with gather(list(tile.parameters()), 0):
                        tile.weight.copy_(weight[rows, columns])
                        if getattr(tile, "bias", None) is not None and bias is not None:
                            tile.bias.copy_(bias[rows])

    def extra_repr(self) -> str:
        """The arguments, for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _pieces(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.input_is_already_split:
            if isinstance(input_, torch.Tensor) or len(input_) != self.in_splits:
                found = "one tensor" if isinstance(input_, torch.Tensor) else f"{len(input_)} pieces"
                msg = (
                    f"TiledLinear with input_is_already_split=True takes a list of in_splits = {self.in_splits} "
                    f"tensors, found {found}; split the input along its last dimension into widths {self.in_sizes}"
                )
                raise UsageError(msg)
            return input_
        if not isinstance(input_, torch.Tensor):
            msg = f"TiledLinear takes one tensor, found a {type(input_).__name__}; set input_is_already_split=True"
            raise UsageError(msg)
        if input_.shape[-1:] != (self.in_features,):
            msg = (
                f"TiledLinear takes inputs whose last dimension is in_features = {self.in_features}, "
                f"found shape {tuple(input_.shape)}"
            )
            raise UsageError(msg)
        return input_.split(self.in_sizes, dim=-1) if self.in_splits > 1 else (input_,)

    def _add(self, total: Any, term: Any) -> Any:
        if total is None:
            # A tile may keep its output for its backward pass: the sum must not overwrite that tensor.
            return term.clone() if self.in_splits > 1 else term
        return total.add_(term)

    def _join(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(tuple(outputs), dim=-1) if len(outputs) > 1 else outputs[0]

    def _checked(self, other: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of `other`, if they fit."""
        weight, bias = getattr(other, "weight", None), getattr(other, "bias", None)
        wanted = (self.out_features, self.in_features)
        if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != wanted:
            found = f"a weight of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else "no weight"
            msg = (
                f"TiledLinear copies from a layer whose weight has shape {wanted}, found {found} in "
                f"{type(other).__name__}; if its parameters rest cut over ranks, pass "
                "gather=mpispeed.zero.GatheredParameters"
            )
            raise UsageError(msg)
        if (bias is not None) != self.use_bias:
            has, makes = ("a", True) if bias is not None else ("no", False)
            msg = (
                f"the layer to copy from has {has} bias, this TiledLinear was made with bias={self.use_bias}; "
                f"make it with bias={makes}"
            )
            raise UsageError(msg)
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            msg = (
                f"TiledLinear copies from a layer whose bias has shape ({self.out_features},), found "
                f"{tuple(bias.shape)} in {type(other).__name__}"
            )
            raise UsageError(msg)
        return weight, bias


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of layers that return `(output, bias)` and leave it to their caller to add the bias.

    Returns `(output, bias)`, where bias is None if no tile returned one; with `combine_out_splits=False` a list of
    such pairs, one for each piece of the output.
    """

    def _add(self, total: Any, term: Any) -> Any:
        if not (isinstance(term, tuple) and len(term) == 2):
            msg = (
                "TiledLinearReturnBias needs a linear_cls whose layers return (output, bias), found a "
                f"{type(term).__name__}; use TiledLinear for layers that return one tensor"
            )
            raise UsageError(msg)
        output, bias = term
        if total is None:
            return super()._add(None, output), bias
        before = total[1]
        return super()._add(total[0], output), bias if before is None else before if bias is None else before + bias

    def _join(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._join([output for output, _ in outputs]), super()._join(biases) if biases else None


def piece_sizes(items: int, parts: int, what: str = "items") -> list[int]:
    """Sizes of `parts` pieces of `items`: as equal as can be, the larger ones first.

    Raises:
        UsageError: `parts` is not in 1 to `items`; the message names `what`, "in" or "out".
    """
    if not 1 <= parts <= items:
        msg = f"{what}_splits = {parts} is out of range: {what}_features = {items} can be cut into 1 to {items} pieces"
        raise UsageError(msg)
    size, larger = divmod(items, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _already_whole(params: Sequence[nn.Parameter], modifier_rank: int | None) -> AbstractContextManager[Any]:
    del params, modifier_rank
    return contextlib.nullcontext()
