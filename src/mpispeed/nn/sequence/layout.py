"""The cut of one sequence over the ranks of the sequence axis: arithmetic only.

The axis has two factors. Ring places get two chunks each, one from the front and one from the back ("zigzag"), so that
causal attention costs all of them the same; a place's two chunks, one after the other, are cut over its Ulysses ranks.

Source: Liu, Zaharia and Abbeel, arXiv 2310.01889 (ring); Jacobs et al., arXiv 2309.14509 (Ulysses); Brandon et al.,
"Striped attention", arXiv 2311.09431, on the balance of causal rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.even_split import share

Range = tuple[int, int]
Spans = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The cut of a sequence; equal on all ranks of the axis.

    Rank r of the axis is place r // ulysses of the ring and place r % ulysses inside. Lengths need not be multiples of
    anything; of a sequence shorter than the ranks some ranks have no token.

    Attributes:
        length: tokens of the whole sequence.
        ulysses: ranks that exchange heads for tokens (inner factor).
        ring: ranks between which keys and values travel (outer factor).
        spans: for each row of the batch its documents, as ranges [start, end) of the whole sequence; tokens outside of
            all of them are padding. None: the sequence is one document in every row.
    """

    length: int
    ulysses: int = 1
    ring: int = 1
    spans: Spans | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: a factor below 1, a negative length, a document outside of the sequence or across another.
        """
        if self.ulysses < 1 or self.ring < 1 or self.length < 0:
            msg = (
                f"a sequence of {self.length} tokens cannot be cut over {self.ulysses} x {self.ring} ranks: lengths "
                "are 0 or more, both factors 1 or more"
            )
            raise UsageError(msg)
        for number, row in enumerate(self.spans or ()):
            last = 0
            for start, end in row:
                if not last <= start < end <= self.length:
                    msg = (
                        f"row {number} of the batch has a document at [{start}, {end}): documents are in order, have a "
                        f"token at least, and lie inside of the sequence of {self.length} tokens"
                    )
                    raise UsageError(msg)
                last = end

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        return self.ulysses * self.ring

    def ring_ranges(self, place: int) -> tuple[Range, ...]:
        """Ranges of the whole sequence that the ranks of one ring place have together, in their local order."""
        if self.ring == 1:
            return ((0, self.length),) if self.length else ()
        chunks = 2 * self.ring
        return _joined([share(self.length, chunk, chunks) for chunk in (place, chunks - 1 - place)])

    def ring_count(self, place: int) -> int:
        """Tokens of the ranks of one ring place together."""
        return sum(end - start for start, end in self.ring_ranges(place))

    def ulysses_counts(self, place: int) -> tuple[int, ...]:
        """Tokens of each rank of one ring place."""
        count = self.ring_count(place)
        cuts = [share(count, rank, self.ulysses) for rank in range(self.ulysses)]
        return tuple(stop - start for start, stop in cuts)

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Ranges of the whole sequence that a rank of the axis has, in its local order."""
        place, inner = divmod(rank, self.ulysses)
        whole = self.ring_ranges(place)
        first, last = share(sum(end - start for start, end in whole), inner, self.ulysses)
        found, offset = [], 0
        for start, end in whole:
            here = (max(first - offset, 0) + start, min(last - offset, end - start) + start)
            offset += end - start
            found.append(here)
        return _joined(found)

    def count(self, rank: int) -> int:
        """Tokens that a rank of the axis has."""
        return sum(end - start for start, end in self.ranges(rank))

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Positions in the whole sequence of a rank's tokens, int64 of shape [count]."""
        parts = [torch.arange(start, end, device=device) for start, end in self.ranges(rank)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def cut(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """A rank's part of a tensor that has the whole sequence along `dim`; contiguous.

        Raises:
            UsageError: the tensor has another length.
        """
        if x.shape[dim] != self.length:
            msg = f"dim {dim} of a tensor of shape {tuple(x.shape)} is not the sequence of {self.length} tokens"
            raise UsageError(msg)
        parts = [x.narrow(dim, start, end - start) for start, end in self.ranges(rank)]
        return (torch.cat(parts, dim) if len(parts) != 1 else parts[0].contiguous()) if parts else x.narrow(dim, 0, 0)

    def join(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor from the parts of all ranks in rank order: the inverse of `cut`.

        Raises:
            UsageError: another number of parts than of ranks, or a part of another length.
        """
        if len(parts) != self.size:
            msg = f"{len(parts)} parts of a sequence that was cut over {self.size} ranks: give one of each rank"
            raise UsageError(msg)
        found: list[tuple[int, torch.Tensor]] = []
        for rank, part in enumerate(parts):
            if part.shape[dim] != self.count(rank):
                msg = f"the part of rank {rank} has {part.shape[dim]} tokens along dim {dim}; it had {self.count(rank)}"
                raise UsageError(msg)
            offset = 0
            for start, end in self.ranges(rank):
                found.append((start, part.narrow(dim, offset, end - start)))
                offset += end - start
        found.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in found], dim) if found else parts[0]


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges that are not empty; neighbours become one."""
    found: list[Range] = []
    for start, end in ranges:
        if start >= end:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return tuple(found)
