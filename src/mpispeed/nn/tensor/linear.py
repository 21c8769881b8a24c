"""Linear layers whose weights are sliced over a slicing group.

A column-parallel layer has some of the outputs, a row-parallel one some of the inputs. A pair of them needs one sum in
forward and one in backward.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from mpispeed.base.errors import UsageError
from mpispeed.base.param_marks import part_of
from mpispeed.base.split_grads import Splits
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.entry import Entry, SequenceCut
from mpispeed.nn.tensor.tensor_cut import COPIED, Ranges, TensorCut, marks_of

Layer = TypeVar("Layer", bound="CutLayer")


class CutLayer(Splits, nn.Module):
    """Base of sliced layers. Copies of a model use the same group.

    Attributes:
        comm: the slicing group.
        weight: this rank's part.
        bias: likewise, or the full one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm

    def __deepcopy__(self: Layer, memo: dict[int, Any]) -> Layer:
        memo[id(self.comm)] = self.comm
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _adopt(self, name: str, whole: torch.Tensor | None, cut: TensorCut) -> None:
        """Keep this rank's part of a full parameter, and how it was sliced."""
        if whole is None:
            self.register_parameter(name, None)
            return
        part = cut.take(whole, self.comm.rank, self.comm.size)
        self.register_parameter(name, part_of(whole, part))
        marks_of(self).cuts[name] = cut


class ColumnLinear(CutLayer):
    """A linear layer whose outputs are sliced over the ranks.

    The full weights are made with the current generator and then sliced, so ranks with equal generators together have
    the weights of `nn.Linear`.

    Args:
        in_features: width of the input.
        out_features: width of the full output.
        comm: the slicing group.
        bias: add a bias.
        sub_sizes: widths of parts of the output that are sliced separately, as in fused query, key and value; empty
            for one part.
        grains: one for each part: shares are multiples of it, e.g. the width of a head; empty for 1.
        gather_output: return the full output; only of one part in grains of 1.
        sequence_parallel: the input is this rank's part of the sequence.
        sequence_dim: the dim of the sequence; 0 where the input has two dims.
        transposed: the weight is [in_features, out_features], as of GPT-2's `Conv1D`.
        whole: a layer whose `weight` and `bias` are sliced instead of new ones; they are not changed.
        entry: entry of the input into the sliced region; layers that take the same input share one.
        ranges: of the output on each rank, instead of shares; they may overlap, and gradients are then partial sums.
        kwargs: `dtype` and `device` of new weights.

    Shapes:
        input: [..., in_features], full and equal on all ranks, or this rank's part of the sequence
        output: [..., this rank's part of out_features], of the full sequence

    Collective over: `comm`, in backward; with `sequence_parallel` or `gather_output` in forward too.

    Raises:
        UsageError: `gather_output` with parts or grains.
        ConfigError: parts and grains do not fit to the width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Comm,
        *,
        bias: bool = True,
        sub_sizes: Sequence[int] = (),
        grains: Sequence[int] = (),
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        transposed: bool = False,
        whole: nn.Module | None = None,
        entry: Entry | None = None,
        ranges: Ranges = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(comm)
        if gather_output and (ranges or sub_sizes or set(grains) - {1}):
            msg = f"gather_output joins one part in grains of 1, not parts {tuple(sub_sizes)} in grains {tuple(grains)}"
            raise UsageError(msg)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.transposed = gather_output, transposed
        self.entry = entry or Entry(comm, SequenceCut(sequence_dim) if sequence_parallel else None)
        kind = COPIED if ranges else "sub" if sub_sizes else "column"
        weight, offset = _tensors(whole or whole_linear(in_features, out_features, bias, transposed, **kwargs))
        parts = (tuple(sub_sizes), tuple(grains), tuple(ranges))
        self._adopt("weight", weight, TensorCut(kind, 1 if transposed else 0, tuple(weight.shape), *parts))
        self._adopt("bias", offset, TensorCut(kind, 0, (out_features,), *parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        out = self.product(self.entry(x), self.weight, self.bias, self.transposed)
        return regions.gather_from(out, self.comm, -1, self.out_features) if self.gather_output else out

    def extra_repr(self) -> str:
        """Full widths and the rank."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, rank {_place(self.comm)}"


class RowLinear(CutLayer):
    """A linear layer whose inputs are sliced over the ranks; the ranks' outputs are summed.

    The bias is replicated and added once, after the sum.

    Args:
        in_features: width of the full input.
        out_features: width of the output.
        comm: the slicing group.
        bias: add a bias.
        grain: shares of the input are multiples of it, as in the layers before.
        input_is_whole: the input is full on every rank, which takes its part.
        sequence_parallel: return this rank's part of the sequence. Gradients of the bias are partial sums then.
        sequence_dim: the dim of the sequence; 0 where the input has two dims.
        transposed: the weight is [in_features, out_features], as of GPT-2's `Conv1D`.
        whole: a layer whose `weight` and `bias` are taken instead of new ones; they are not changed.
        sequence: shared by the layers of a model whose sequence is not always sliced.
        ranges: of the input on each rank, instead of shares.
        kwargs: `dtype` and `device` of new weights.

    Shapes:
        input: [..., this rank's part of in_features]
        output: [..., out_features]

    Collective over: `comm`, in forward; with `sequence_parallel` or `input_is_whole` in backward too.

    Raises:
        UsageError: a sequence that does not divide; `input_is_whole` with a grain.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Comm,
        *,
        bias: bool = True,
        grain: int = 1,
        input_is_whole: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        transposed: bool = False,
        whole: nn.Module | None = None,
        sequence: SequenceCut | None = None,
        ranges: Ranges = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(comm)
        if input_is_whole and (grain > 1 or ranges):
            msg = f"input_is_whole takes parts in grains of 1, not {ranges or grain}"
            raise UsageError(msg)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_whole, self.transposed = input_is_whole, transposed
        self.sequence = sequence or (SequenceCut(sequence_dim) if sequence_parallel else None)
        weight, offset = _tensors(whole or whole_linear(in_features, out_features, bias, transposed, **kwargs))
        how = (COPIED if ranges else "row", 0 if transposed else 1, tuple(weight.shape))
        self._adopt("weight", weight, TensorCut(*how, (), (grain,), tuple(ranges)))
        self._adopt("bias", offset, TensorCut("replicated", -1, (out_features,)))
        if self.sequence is not None and self.bias is not None:
            marks_of(self).partial.add("bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, then the bias."""
        if self.input_is_whole:
            x = regions.scatter_to(x, self.comm)
        out = self.product(x, self.weight, None, self.transposed)
        if self.sequence is not None and self.sequence.is_on:
            dim = self.sequence.dim_of(out)
            regions.check_divisible(out.shape[dim], self.comm, "a sequence")
            out = regions.reduce_scatter_sequence(out, self.comm, dim)
        else:
            out = regions.reduce_from(out, self.comm, is_own=True)
        # with autocast the product has another dtype than the parameter
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        """Full widths and the rank."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, rank {_place(self.comm)}"


def whole_linear(in_features: int, out_features: int, bias: bool, transposed: bool, **kwargs: Any) -> nn.Module:
    """The full layer, with new weights."""
    layer = nn.Linear(in_features, out_features, bias=bias, **kwargs)
    if transposed:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    return layer


def _tensors(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias, if it has one."""
    return layer.weight, getattr(layer, "bias", None)


def _place(comm: Comm) -> str:
    return f"{comm.rank} of {comm.size}"
