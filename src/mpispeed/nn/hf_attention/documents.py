"""Documents: tokens that belong together in the rows of a batch, without a mask of length x length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mpispeed.nn.attention.pieces import Piece, pieces_of

Spans = Sequence[Sequence[tuple[int, int]]]


@dataclass(slots=True)
class Documents:
    """Documents of a batch, and whether tokens see only what is before them.

    `spans` has for each row its documents as (start, end); None: all rows are one document. `is_causal` is None where
    the layer knows it.
    """

    spans: Spans | None
    length: int
    is_causal: bool | None = None
    _pieces: dict[bool, list[Piece]] = field(default_factory=dict)

    def pieces(self, *, is_causal: bool) -> list[Piece]:
        """What the core computes; made once for all layers."""
        if is_causal not in self._pieces:
            whole = [(0, self.length)]
            self._pieces[is_causal] = pieces_of(whole, whole, causal=is_causal, spans=self.spans)
        return self._pieces[is_causal]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        if self.spans is None:
            return self.length
        return max((end - start for row in self.spans for start, end in row), default=0)


# a mask goes through the model's own code, which takes tensors; what it means stays here
_OF_MASK: Any = WeakTensorKeyDictionary()
_OF_POSITIONS: Any = WeakTensorKeyDictionary()


def remember(numbers: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Keep what a mask means while the mask lives, and return the mask."""
    _OF_MASK[numbers] = documents
    return numbers


def of_mask(mask: torch.Tensor) -> Documents | None:
    """What a mask [B, S] means, of document numbers or of 0 (no token) and 1; None: not to be told by documents."""
    found = _OF_MASK.get(mask)
    if found is None:
        spans = spans_of(mask)
        found = None if spans is None else Documents(spans, mask.shape[1])
    return found


def of_positions(positions: torch.Tensor, batch: int) -> Documents | None:
    """Documents that begin wherever positions [B or 1, S] do not go on by one; None: one document."""
    key = (_version(positions), batch)
    found = _OF_POSITIONS.get(positions)
    if found is None or found[0] != key or positions.is_inference():
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        documents = None
        if bool(starts[:, 1:].any()):
            numbers = starts.cumsum(1).expand(batch, -1)
            documents = Documents(spans_of(numbers), numbers.shape[1])
        found = _OF_POSITIONS[positions] = (key, documents)
    return found[1]


def of_lengths(ends: torch.Tensor, length: int) -> Documents:
    """Documents of one row, by the ends of documents as flash attention takes them (`cu_seq_lens`)."""
    key = (_version(ends), length)
    found = _OF_POSITIONS.get(ends)
    if found is None or found[0] != key or ends.is_inference():
        places = ends.tolist()
        spans = [pair for pair in pairwise(places) if pair[0] < pair[1]]
        found = _OF_POSITIONS[ends] = (key, Documents([spans], length))
    return found[1]


def _version(numbers: torch.Tensor) -> int:
    """A number that changes when a tensor does; tensors of inference mode have none."""
    return -1 if numbers.is_inference() else numbers._version


def spans_of(numbers: torch.Tensor) -> list[list[tuple[int, int]]] | None:
    """Documents of each row by their numbers [B, S], where 0 is no token.

    None if a document goes on behind tokens of another or of none: its keys are then no range.
    """
    found = []
    for row in numbers.to(torch.int64).cpu():
        values, counts = torch.unique_consecutive(row, return_counts=True)
        ends = counts.cumsum(0).tolist()
        parts = [(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
        kept = [(value, part) for value, part in zip(values.tolist(), parts, strict=True) if value != 0]
        if len({value for value, _ in kept}) < len(kept):
            return None
        found.append([part for _, part in kept])
    return found


Seen = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def numbers_by(seen: Seen, batch: int, length: int, device: torch.device) -> tuple[torch.Tensor, bool] | None:
    """Numbers of documents [batch, length] and causality of a mask function; None if it is no such mask.

    The function is asked in a line: does a token see the one before it, the one after it, the ends of its document, and
    what lies beyond them. Causal, packed, chunked and full masks answer as documents do; windows and prefixes do not.
    """
    rows = torch.arange(batch, device=device)[:, None]
    places = torch.arange(length, device=device)[None].expand(batch, -1)
    head = torch.zeros((1, 1), dtype=torch.int64, device=device)

    def asks(keys: torch.Tensor) -> torch.Tensor:
        answers = seen(rows, head, places, keys.clamp(0, length - 1))
        return torch.as_tensor(answers, device=device).expand(batch, length)

    starts = ~asks(places - 1)
    starts[:, 0] = True
    numbers = starts.cumsum(1)
    first = torch.where(starts, places, 0).cummax(1).values
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    last = torch.where(ends, places, length - 1).flip(1).cummin(1).values.flip(1)
    goes_on = ~ends
    ahead = asks(places + 1)
    is_causal = not bool((ahead & goes_on).any())
    is_full = bool(ahead[goes_on].all())
    sees_own = asks(places) & asks(first) & (asks(last) | torch.tensor(is_causal, device=device))
    sees_others = (asks(first - 1) & (first > 0)) | (asks(last + 1) & (last < length - 1))
    if not (is_causal or is_full) or not bool(sees_own.all()) or bool(sees_others.any()):
        return None
    return numbers, is_causal
