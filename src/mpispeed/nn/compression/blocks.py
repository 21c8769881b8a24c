"""Structured sparse pruning by sensitivity: patterns of weights that go together, the order in which they go, the ramp.

The sensitivity of a weight is |w dL/dw| (SNIP, Lee, Ajanthan and Torr, arXiv 1810.02340), here as a sum over steps that
decays. That of a group of weights is the sum of those that go with it. What is pruned stays pruned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError

DECAY = 0.9
"""Of sums of sensitivities at each step, as in Intel's Neural Compressor, which DeepSpeed calls."""

MOST_OF_LAYER = Fraction(98, 100)
"""Part of the weights of one layer that may go, as there: a threshold over all layers could take whole layers."""

_NUMBER_BITS, _DIGIT_BITS = 31, 16
_LAST = (1 << 2 * _NUMBER_BITS) - 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """Groups of weights that are pruned together, in a weight seen as [outputs, inputs].

    Of a convolution inputs are kernel height, kernel width and input channel, the last one fastest.

    Attributes:
        text: as in the config.
        rows: outputs of a group.
        columns: inputs of a group.
        removed: weights of a group that go with it: all of a block, or those with the least scores.
    """

    text: str
    rows: int
    columns: int
    removed: int

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern "NxM", blocks of N outputs and M inputs, or "N:M", N of M consecutive inputs.

        Raises:
            ConfigError: it is neither.
        """
        found = re.fullmatch(r"\s*([1-9]\d*)\s*([x:])\s*([1-9]\d*)\s*", text)
        if found is None or (found[2] == ":" and int(found[1]) >= int(found[3])):
            msg = f"block_pattern is {text!r}; expected NxM, as 4x1, or N:M with N below M, as 2:4"
            raise ConfigError(msg)
        first, second = int(found[1]), int(found[3])
        if found[2] == ":":
            return cls(text, 1, second, first)
        return cls(text, first, second, first * second)

    @property
    def most(self) -> Fraction:
        """The largest part of all weights that can go."""
        return Fraction(self.removed, self.rows * self.columns)

    @property
    def most_groups(self) -> Fraction:
        """The largest part of the groups of one layer that may go."""
        return min(MOST_OF_LAYER / self.most, Fraction(1))

    def fits(self, shape: tuple[int, ...], out_dim: int = 0) -> bool:
        """True if groups of this form tile a weight of that shape."""
        outputs, inputs = (shape[1], shape[0]) if out_dim else (shape[0], math.prod(shape[1:]))
        return outputs % self.rows == 0 and inputs % self.columns == 0

    def grouped(self, values: Tensor, out_dim: int = 0) -> Tensor:
        """The elements of each group. Shapes: values as the weight; result [groups, rows * columns]."""
        flat = _as_matrix(values, out_dim)
        tiles = flat.view(flat.shape[0] // self.rows, self.rows, -1, self.columns)
        return tiles.transpose(1, 2).reshape(-1, self.rows * self.columns)

    def ungrouped(self, groups: Tensor, shape: tuple[int, ...], out_dim: int = 0) -> Tensor:
        """The reverse of `grouped`, for a weight of that shape."""
        outputs = shape[1] if out_dim else shape[0]
        tiles = groups.view(outputs // self.rows, -1, self.rows, self.columns).transpose(1, 2)
        flat = tiles.reshape(outputs, -1)
        if out_dim:
            return flat.t().contiguous()
        if len(shape) == 4:
            return flat.view(outputs, *shape[2:], shape[1]).permute(0, 3, 1, 2).contiguous()
        return flat.view(shape)

    def doomed(self, scores: Tensor) -> Tensor:
        """The weights that go if their group does, the first of equal ones.

        Shapes: scores [groups, weights]; result (bool) the same, or [1, 1] for blocks.
        """
        if self.removed == self.rows * self.columns:
            return torch.ones((1, 1), dtype=torch.bool, device=scores.device)
        order = scores.argsort(dim=1, stable=True)[:, : self.removed]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, value=True)


def _as_matrix(values: Tensor, out_dim: int) -> Tensor:
    if out_dim:
        return values.t().contiguous()
    if values.dim() == 4:
        values = values.permute(0, 2, 3, 1)
    return values.reshape(values.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Ramp:
    """The schedule of pruning: the steps after which groups go, and how many by then.

    Attributes:
        dense_ratio: part of the weights that is left in the end.
        begin: first step after which groups may go.
        end: the last one.
        stride: steps between.
    """

    dense_ratio: float
    begin: int
    end: int
    stride: int

    def is_due(self, step: int) -> bool:
        """True if groups go after step number `step`, from 1. After the last one all are gone, whatever the stride."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.stride == 0 or step == self.end)

    def sparsity(self, step: int) -> Fraction:
        """Part of the weights that is gone after a step: the cubic ramp of Zhu and Gupta, arXiv 1710.01878."""
        left = Fraction(self.end - step, self.end - self.begin) if step < self.end else Fraction(0)
        return (1 - Fraction(repr(self.dense_ratio))) * (1 - left**3)


def ranks_of(scores: Tensor, is_pruned: Tensor, salt: int, most: Fraction = MOST_OF_LAYER) -> Tensor:
    """Numbers by which groups of one layer go, the least first: pruned ones, then others by score.

    Those that stay, whatever the threshold, have the last number. Equal scores, as those of layers that were not used,
    go in an order that is mixed over the layers.

    Args:
        scores: of groups, none negative.
        is_pruned: those that are gone already.
        salt: a number of the layer, the same on all ranks.
        most: part of the layer's groups that may go.

    Shapes: scores, is_pruned, result (int64) [groups].
    """
    bits = scores.float().contiguous().view(torch.int32).long() + 1  # non-negative floats are ordered as their bits
    bits.masked_fill_(is_pruned, 0)
    numbers = torch.arange(len(bits), device=bits.device) + salt
    mixed = (numbers * 0x9E3779B1) & ((1 << _NUMBER_BITS) - 1)  # odd: distinct within a layer (Fibonacci hashing)
    ranks = (bits << _NUMBER_BITS) | mixed
    stay = len(ranks) - math.floor(len(ranks) * most)
    ranks[ranks.topk(stay).indices] = _LAST
    return ranks


def rank_at(ranks: Iterable[Tensor], share: Fraction, add_up: Callable[[Tensor], None]) -> int:
    """The number up to which groups go, so that they are that share of all groups, or all that may.

    Args:
        ranks: of `ranks_of`, of the groups that this rank counts.
        share: rounded down to whole groups.
        add_up: sums a tensor of counts over the ranks that count groups.
    """
    own, prefix, wanted = list(ranks), 0, -1
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(1 << _DIGIT_BITS, dtype=torch.int64)
        for each in own:
            digits = each[(each >> shift >> _DIGIT_BITS) == prefix] >> shift & ((1 << _DIGIT_BITS) - 1)
            counts += torch.bincount(digits, minlength=len(counts)).cpu()
        add_up(counts)
        total = counts.cumsum(0)
        if wanted < 0:
            wanted = math.floor(share * int(total[-1]))
        if not wanted:
            return -1
        digit = int(torch.searchsorted(total, wanted))
        wanted -= int(total[digit - 1]) if digit else 0
        prefix = prefix << _DIGIT_BITS | digit
    return min(prefix, _LAST - 1)
