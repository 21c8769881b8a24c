"""Elements of whole tensors that are spread over several files, read a part at a time."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from mpispeed.ckpt.foreign.faults import ForeignMismatch

#: elements that are brought into memory at once
WINDOW = 1 << 20


class Values(ABC):
    """The elements of one whole tensor, in row-major order.

    Attributes:
        numel: number of elements.
        dtype: their torch dtype.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype

    @abstractmethod
    def read(self, first: int, last: int) -> torch.Tensor:
        """The elements [first, last) as a flat tensor; of the file's memory where that can be."""

    def parts(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """The elements [first, last), a window at a time."""
        for start in range(first, last, WINDOW):
            yield self.read(start, min(start + WINDOW, last))

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """The same with `other(values)` in place of every tensor that it is made of."""
        del other
        return self

    def whole(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """All of it as a tensor with memory of its own."""
        out = torch.empty(self.numel, dtype=dtype or self.dtype)
        done = 0
        for part in self.parts(0, self.numel):
            out[done : done + part.numel()].copy_(part)
            done += part.numel()
        return out.reshape(tuple(shape))


class Plain(Values):
    """A tensor that is whole already, of any strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.numel(), tensor.dtype)
        self._tensor = tensor.detach() if not tensor.is_meta else tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self._tensor

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """As `Values.replaced`."""
        return other(self)

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        if self._tensor.is_contiguous():
            return self._tensor.reshape(-1)[first:last]
        if self._tensor.dim() < 2:
            return self._tensor[first:last].contiguous()
        width = math.prod(self._tensor.shape[1:])
        row = first // width
        rows = self._tensor[row : -(-last // width)].reshape(-1)  # a copy of the rows that are touched
        return rows[first - row * width : last - row * width]


class Chain(Values):
    """Ranges of other values, one after the other."""

    def __init__(self, links: Sequence[tuple[Values, int, int]], dtype: torch.dtype) -> None:
        """Args: `links`: (values, first element, one past the last)."""
        self._links = [(values, first, last) for values, first, last in links if last > first]
        self._starts = [0]
        for _, first, last in self._links:
            self._starts.append(self._starts[-1] + last - first)
        super().__init__(self._starts[-1], dtype)

    @property
    def links(self) -> list[tuple[Values, int, int]]:
        """As of the constructor."""
        return list(self._links)

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """As `Values.replaced`."""
        return Chain([(values.replaced(other), first, last) for values, first, last in self._links], self.dtype)

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        parts = []
        index = bisect.bisect_right(self._starts, first) - 1
        while first < last:
            values, begin, _ = self._links[index]
            stop = min(last, self._starts[index + 1])
            shift = begin - self._starts[index]
            parts.append(values.read(first + shift, stop + shift))
            first, index = stop, index + 1
        if not parts:
            return torch.empty(0, dtype=self.dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SideBySide(Values):
    """Matrices with equal numbers of rows, concatenated along the columns."""

    def __init__(self, slices: Sequence[Values], rows: int) -> None:
        super().__init__(sum(values.numel for values in slices), slices[0].dtype)
        self._rows = rows
        self._slices = [(values, values.numel // rows if rows else 0) for values in slices]
        self._width = self.numel // rows if rows else 0

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """As `Values.replaced`."""
        return SideBySide([values.replaced(other) for values, _ in self._slices], self._rows)

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        top, bottom = first // self._width, -(-last // self._width)
        blocks = [values.read(top * width, bottom * width).view(bottom - top, width) for values, width in self._slices]
        start = top * self._width
        return torch.cat(blocks, 1).reshape(-1)[first - start : last - start]


class Mean(Values):
    """Mean of copies that differ."""

    def __init__(self, copies: Sequence[Values]) -> None:
        super().__init__(copies[0].numel, copies[0].dtype)
        self._copies = list(copies)

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """As `Values.replaced`."""
        return Mean([values.replaced(other) for values in self._copies])

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        total = torch.stack([values.read(first, last).double() for values in self._copies])
        return total.mean(0).to(self.dtype)


def placed(parts: Sequence[torch.Tensor | None], stride: int, first: int, last: int, what: str) -> Values:
    """The elements [first, last) of a flat tensor; the shard of rank r begins at r * `stride`.

    Raises:
        ForeignMismatch: some of them are in no part.
    """
    links: list[tuple[Values, int, int]] = []
    at = first
    while at < last:
        rank = at // stride if stride else len(parts)
        part = parts[rank] if rank < len(parts) else None
        stop = min(last, (rank + 1) * stride)
        if part is None or stop - rank * stride > part.numel():
            held = 0 if part is None else part.numel()
            msg = (
                f"{what}: rank {rank} holds {held} elements, {stop - rank * stride} are needed; the save is incomplete"
            )
            raise ForeignMismatch(msg)
        links.append((Plain(part), at - rank * stride, stop - rank * stride))
        at = stop
    dtype = next((part.dtype for part in parts if part is not None), torch.float32)
    return Chain(links, dtype)


class Rounded(Values):
    """Values in another dtype."""

    def __init__(self, values: Values, dtype: torch.dtype) -> None:
        super().__init__(values.numel, dtype)
        self._values = values

    def replaced(self, other: Callable[[Plain], Values]) -> Values:
        """As `Values.replaced`."""
        return Rounded(self._values.replaced(other), self.dtype)

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        return self._values.read(first, last).to(self.dtype)


def are_equal(first: Values, second: Values, *, has_nan: bool = False) -> bool:
    """True if all elements are equal as numbers; with `has_nan` also where both are NaN."""
    if first.numel != second.numel:
        return False
    pairs = zip(first.parts(0, first.numel), second.parts(0, second.numel), strict=True)
    if has_nan:
        return all(bool(((one == other) | (one.isnan() & other.isnan())).all()) for one, other in pairs)
    return all(torch.equal(one, other) for one, other in pairs)
