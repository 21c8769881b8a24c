"""Compression of layers that are sliced over a tensor group, as that of the full layer.

What belongs to an output, an input or a head, as scores and masks do, is full and equal on all slices; what has the
shape of the weight is cut as the weight. Numbers that hang on the full weight, such as the largest element of a
quantization group, are reduced over the slices. So a mask, and a scale from a minimum and a maximum, has the bits that
it would have without slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpispeed.nn.compression.quantizers import noise_of
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.linear import CutLayer, RowLinear
from mpispeed.nn.tensor.tensor_cut import WHOLE_KINDS, TensorCut, marks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.comm import Comm


@dataclass(frozen=True)
class Slices:
    """The slicing of one layer.

    Attributes:
        comm: the slicing group.
        cut: of the weight.
    """

    comm: Comm
    cut: TensorCut

    @classmethod
    def of(cls, layer: nn.Module) -> Slices | None:
        """That of a layer; None if it is full on this rank."""
        if not isinstance(layer, CutLayer) or layer.comm.size == 1:
            return None
        cut = marks_of(layer).cuts["weight"]
        return None if cut.kind in WHOLE_KINDS else cls(layer.comm, cut)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor like the full weight."""
        return self.cut.take(whole, self.comm.rank, self.comm.size)

    def whole(self, part: Tensor) -> Tensor:
        """The full tensor of which the ranks have parts as of the weight; no autograd. Collective over: the slices."""
        places, whole = self._places.to(part.device), part.new_zeros(self.cut.shape)
        whole.index_copy_(self.cut.dim, places, part.detach().narrow(self.cut.dim, 0, len(places)))
        self.comm.all_reduce(whole)
        return whole

    def along(self, vector: Tensor, dim: int) -> Tensor:
        """The numbers of a full vector that belong to this rank's part of the weight along `dim`.

        Collective over: the slices, in backward.
        """
        vector = regions.copy_to(vector, self.comm)
        if dim != self.cut.dim:
            return vector
        found = vector.index_select(0, self._places.to(vector.device))
        missing = self._held - len(found)
        return F.pad(found, (0, missing)) if missing else found

    @property
    def size(self) -> int:
        """Elements of the full weight."""
        return math.prod(self.cut.shape)

    def count(self, mask: Tensor) -> int:
        """How often a mask like the full weight is true, of which ranks have parts. Collective over: the slices."""
        found = mask.narrow(self.cut.dim, 0, len(self._places)).sum()
        self.comm.all_reduce(found)
        return int(found)

    def group_numbers(self, groups: int) -> Tensor:
        """The quantization group of each element of this rank's part, of the flat full weight in equal groups.

        Padding is in a group of its own, behind the others.

        Shapes: as the part; with 1 for all dims behind the first where groups are of full rows.
        """
        shape, size = self.cut.shape, math.prod(self.cut.shape) // groups
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        flat = torch.zeros((1,) * len(shape), dtype=torch.int64)
        is_by_rows = size % strides[0] == 0
        for dim, stride in enumerate(strides[:1] if is_by_rows else strides):
            places = self._places if dim == self.cut.dim else torch.arange(shape[dim])
            flat = flat + (places * stride).view([-1 if each == dim else 1 for each in range(len(shape))])
        numbers = flat // size
        missing = self._held - len(self._places)  # of a vocabulary, whose rows are cut
        return torch.cat([numbers, numbers.new_full((missing, *numbers.shape[1:]), groups)]) if missing else numbers

    @cached_property
    def _places(self) -> Tensor:
        """Places along the dim that is cut, of this rank's elements without padding."""
        ranges = self.cut.ranges(self.comm.rank, self.comm.size)
        return torch.cat([torch.arange(start, stop) for start, stop in ranges])

    @property
    def _held(self) -> int:
        return self.cut.local_shape(self.comm.rank, self.comm.size)[self.cut.dim]


class SlicedWeight:
    """A slice of a weight in the groups of the full one, as `Grouped`. Collective over: the slices."""

    def __init__(self, part: Tensor, groups: int, slices: Slices) -> None:
        shape = slices.cut.shape
        self.values, self._groups, self._slices = part.detach().float(), groups, slices
        self._numbers = slices.group_numbers(groups).to(part.device)
        self._size = math.prod(shape) // groups
        self._is_shared = slices.cut.dim > 0 or groups % shape[0] > 0

    def range(self) -> tuple[Tensor, Tensor]:
        """As `Grouped`."""
        ends = torch.stack([self._fold(-self.values, "amax"), self._fold(self.values, "amax")])
        low, high = self._reduced(ends, "max")[:, self._numbers]
        return -low, high

    def mean(self, x: Tensor) -> Tensor:
        """As `Grouped`; that of the full weight up to rounding."""
        return self.total(x) / self._size

    def total(self, x: Tensor) -> Tensor:
        """As `Grouped`; that of the full weight up to rounding."""
        return self._reduced(self._fold(x, "sum"), "sum")[self._numbers]

    def noise(self, key: int) -> Tensor:
        """As `Grouped`."""
        return self._slices.own(noise_of(torch.Size(self._slices.cut.shape), key, self.values.device))

    def _fold(self, x: Tensor, op: str) -> Tensor:
        """One number for each group, of this rank's elements, and one for padding."""
        numbers = self._numbers.flatten()
        out = x.new_full((self._groups + 1,), 0.0 if op == "sum" else -torch.inf)
        return out.scatter_reduce_(0, numbers, getattr(x.reshape(len(numbers), -1), op)(1), op) if x.numel() else out

    def _reduced(self, x: Tensor, op: str) -> Tensor:
        if self._is_shared:
            self._slices.comm.all_reduce(x, op)
        return x


def put(layer: nn.Module, name: str, whole: Tensor) -> None:
    """Give a layer a score parameter or a buffer; of one like the weight it gets its part."""
    slices, own = Slices.of(layer), whole
    if slices is not None and name.startswith("sparse_"):
        marks_of(layer).cuts[name], own = slices.cut, slices.own(whole)
    if not isinstance(whole, nn.Parameter):
        layer.register_buffer(name, own)
        return
    layer.register_parameter(name, whole if own is whole else nn.Parameter(own, whole.requires_grad))
    if "weight" in marks_of(layer).partial:  # of a layer that sees a part of the tokens
        marks_of(layer).partial.add(name)


def comm_of_input(layer: nn.Module) -> Comm | None:
    """The ranks that have parts of each row of a layer's input; None where rows are full."""
    if not isinstance(layer, RowLinear) or layer.input_is_whole or layer.comm.size == 1:
        return None
    return layer.comm


def along_bias(vector: Tensor, layer: nn.Module) -> Tensor:
    """The numbers of a vector, one for each output of the full layer, that belong to its bias on this rank.

    Collective over: the slices, in backward, unless every rank has the full gradient of the bias.
    """
    slices = Slices.of(layer)
    if slices is None:
        return vector
    marks = marks_of(layer)
    if marks.cuts["bias"].kind not in WHOLE_KINDS:
        return slices.along(vector, slices.cut.dim)
    return regions.copy_to(vector, slices.comm) if "bias" in marks.partial else vector


def along_input(vector: Tensor, layer: nn.Module) -> Tensor:
    """The numbers of a vector, one for each input of the full layer, that belong to its input on this rank."""
    slices = Slices.of(layer)
    return vector if slices is None or comm_of_input(layer) is None else slices.along(vector, slices.cut.dim)


def shared_range(x: Tensor, comm: Comm, dims: Sequence[int]) -> Tensor:
    """The least and the greatest elements along dims of which ranks have parts, [2, ...]. Collective over: `comm`."""
    x = x.detach().float()
    ends = torch.stack([-x, x])
    dims = [dim % x.dim() + 1 for dim in dims]
    if x.numel():
        ends = ends.amax(dims, keepdim=True)
    else:
        ends = ends.new_full([1 if dim in dims else length for dim, length in enumerate(ends.shape)], -torch.inf)
    comm.all_reduce(ends, "max")
    return torch.stack([-ends[0], ends[1]])
