"""A batch, cut along its sequence: what each rank gets of the inputs of a model, and where documents are.

All ranks of a sequence begin with the same whole batch. Tensors are cut whose dim 1 is the length; what a cut loses is
settled before it: labels of a causal model are shifted by one token, positions are those in the whole sequence, and
padding and the ends of documents become ranges that attention heeds (`Layout.spans`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.tensor_tree import map_tensors, tensors
from mpispeed.nn.sequence.layout import Layout, Range, Spans
from mpispeed.nn.sequence.loss import IGNORED

LENGTHS = ("input_ids", "inputs_embeds")
"""Names of inputs whose dim 1 is the length, before others."""
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Names by which transformers is told where documents end; attention is told by the layout instead."""
NAMED = (
    "attention_mask", "position_ids", "labels", "shift_labels", "cache_position", "num_items_in_batch",
    "past_key_values", *ENDS,
)  # fmt: skip
"""Names of inputs that are more than tensors to cut."""


@dataclass(frozen=True, slots=True)
class Wants:
    """Needs of a model beside its own tokens.

    Attributes:
        positions: `position_ids`, also if the batch has none.
        padding: a token that its positions do not count; they begin behind its number, as RoBERTa's do. None: positions
            count all tokens from 0.
        mask: this rank's part of `attention_mask`; else attention knows padding by the layout alone.
        shift: it predicts the next token, and shifts `labels` itself unless it is given `shift_labels`.
        items: it divides its loss by `num_items_in_batch`.
    """

    positions: bool = False
    padding: int | None = None
    mask: bool = True
    shift: bool = False
    items: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of ranks over which a sequence is cut, and the place of this rank among all of them."""

    ulysses: int
    ring: int
    rank: int

    @property
    def size(self) -> int:
        """Ranks of a sequence."""
        return self.ulysses * self.ring


def cut_tensors(tree: Any, layout: Layout, rank: int) -> Any:
    """`tree` with this rank's part of each tensor whose dim 1 is the length; others stay whole."""

    def own(x: torch.Tensor) -> torch.Tensor:
        return layout.cut(x, rank, 1) if x.dim() > 1 and x.shape[1] == layout.length else x

    return map_tensors(tree, own)


def cut_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Shape, wants: Wants
) -> tuple[tuple[Any, ...], dict[str, Any], Layout]:
    """This rank's part of the inputs of a model, and the layout of the whole.

    Keyword arguments are known by the names that transformers gives them: `attention_mask`, `position_ids`, `labels`,
    `shift_labels`, `cu_seq_lens_q` and `_k`, `cache_position`, `num_items_in_batch`.

    Args:
        args: positional inputs.
        kwargs: the others.
        shape: how the sequence is cut.
        wants: what the model has to be given.

    Raises:
        UsageError: there is no sequence, or one of them cannot be cut.
    """
    named = dict(kwargs)
    rows, length = lengths(args, named)
    spans = documents(rows, length, named.get("position_ids"), named.get("attention_mask"), named.get("cu_seq_lens_q"))
    layout = Layout(length, shape.ulysses, shape.ring, spans)
    if (wants.items or wants.shift) and named.get("labels") is not None:
        labels = _labels(named, length, shifts=wants.shift)
        if wants.items:
            given = named.get("num_items_in_batch")
            count = (labels != IGNORED).sum() if given is None else given
            named["num_items_in_batch"] = float(count) / shape.size
    if wants.positions and named.get("position_ids") is None:
        if wants.padding is None:
            named["position_ids"] = _positions(rows, length, spans, is_packed="cu_seq_lens_q" in named)
        else:
            named["position_ids"] = _counted(named.get("input_ids"), rows, length, wants.padding)
    for name in ENDS:
        named.pop(name, None)
    if not wants.mask:
        named.pop("attention_mask", None)
    found = {name: _cut_named(name, value, layout, shape.rank) for name, value in named.items()}
    return cut_tensors(args, layout, shape.rank), found, layout


def lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and length of a batch: those of `input_ids` or `inputs_embeds`, or of the first tensor with two dims.

    Raises:
        UsageError: there is none.
    """
    named = [kwargs[name] for name in LENGTHS if isinstance(kwargs.get(name), torch.Tensor)]
    for tensor in (*named, *tensors((args, dict(kwargs)))):
        if tensor.dim() > 1:
            return tensor.shape[0], tensor.shape[1]
    msg = (
        "a batch without a sequence: none of the inputs of the model is a tensor [batch, length, ...]; pass one, or "
        "set sequence_parallel.cuts_batches to false and hand each rank its own part"
    )
    raise UsageError(msg)


def documents(
    rows: int,
    length: int,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
) -> Spans | None:
    """The documents of each row: what sees each other. None: one in each row, without padding.

    A document begins wherever positions do not go up by one, as transformers takes it; or where `cu_seq_lens` says.

    Shapes:
        position_ids: [rows or 1, length]; others say nothing of documents
        attention_mask: [rows, length], zero for padding
        cu_seq_lens: [documents + 1], of a batch of one row

    Raises:
        UsageError: a mask is not of two dims, or zero inside of a row; the ends of documents do not fit.
    """
    whole = [(0, length)]
    if cu_seq_lens is not None:
        ends = [int(end) for end in cu_seq_lens]
        if rows != 1 or ends[0] != 0 or ends[-1] != length or sorted(ends) != ends:
            msg = (
                f"cu_seq_lens_q of {ends} do not fit a batch of {rows} rows of {length} tokens: give one row, and ends "
            )
            msg += f"that go up from 0 to {length}"
            raise UsageError(msg)
        found = [[(start, end) for start, end in itertools.pairwise(ends) if end > start]]
    else:
        found = [_runs(row, length) for row in _rows(position_ids, rows, length)] or [whole] * rows
    if attention_mask is not None:
        found = [_clipped(row, kept) for row, kept in zip(found, _kept(attention_mask, rows, length), strict=True)]
    return None if all(row == whole for row in found) else tuple(map(tuple, found))


def shifted(labels: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label of the next token at each token, and none at the last. Shapes: labels and result [batch, length]."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)


def digest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """A number that differs where tensors of inputs do, to tell whether ranks have the same batch."""
    found = 0
    for tensor in tensors((args, dict(kwargs))):
        found = zlib.crc32(repr((tuple(tensor.shape), str(tensor.dtype))).encode(), found)
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found = zlib.crc32(data.numpy().tobytes(), found)
    return found


# -- parts of it ------------------------------------------------------------------------------------------------------


def _cut_named(name: str, value: Any, layout: Layout, rank: int) -> Any:
    if isinstance(value, torch.Tensor) and name in ("position_ids", "cache_position"):
        is_whole = value.shape[-1] == layout.length  # [length], [batch, length], or [kinds, batch, length]
        return layout.cut(value, rank, value.dim() - 1) if is_whole else value
    return cut_tensors(value, layout, rank)


def _labels(named: dict[str, Any], length: int, *, shifts: bool) -> torch.Tensor:
    """The labels of which a model makes its loss, which are entered as `shift_labels` where it predicts tokens.

    Raises:
        UsageError: labels are not of tokens.
    """
    labels: torch.Tensor = named["labels"]
    if labels.dim() < 2 or labels.shape[1] != length:
        msg = (
            f"labels of shape {tuple(labels.shape)} are not of the {length} tokens of a sequence, which is cut over "
            "ranks: a model that says one thing of a whole sequence cannot be trained with "
            "sequence_parallel_size above 1"
        )
        raise UsageError(msg)
    if named.get("shift_labels") is not None:
        labels = named["shift_labels"]
    elif shifts:
        labels = named["shift_labels"] = shifted(labels)
    return labels


def _positions(rows: int, length: int, spans: Spans | None, *, is_packed: bool) -> torch.Tensor:
    """Positions of all tokens: those of the sequence, or of documents that were told by their ends."""
    whole = torch.arange(length)
    if is_packed and spans is not None:
        for start, end in spans[0]:
            whole[start:end] -= start
    return whole.expand(rows, length)


def _counted(ids: torch.Tensor | None, rows: int, length: int, padding: int) -> torch.Tensor:
    """Positions that count the tokens that are no padding, from `padding` + 1; those of padding are `padding`."""
    is_token = torch.ones(rows, length, dtype=torch.bool) if ids is None else ids != padding
    return is_token.cumsum(1) * is_token + padding


def _rows(position_ids: torch.Tensor | None, rows: int, length: int) -> list[torch.Tensor]:
    """Positions of each row, or nothing if they say nothing of documents."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != length:
        return []
    return list(position_ids.expand(rows, length).cpu())


def _runs(positions: torch.Tensor, length: int) -> list[Range]:
    breaks = (positions[1:] - positions[:-1] != 1).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), length]
    return list(itertools.pairwise(ends))


def _kept(mask: torch.Tensor, rows: int, length: int) -> list[Range]:
    """The range of each row that is no padding.

    Raises:
        UsageError: the mask cannot be said as ranges.
    """
    if mask.dim() != 2 or tuple(mask.shape) != (rows, length):
        msg = (
            f"attention_mask has shape {tuple(mask.shape)}; a sequence that is cut over ranks takes ({rows}, "
            f"{length}), zero for padding, and documents by position_ids that begin anew"
        )
        raise UsageError(msg)
    is_kept = mask.cpu() != 0
    found = []
    for row, kept in enumerate(is_kept):
        places = kept.nonzero().flatten()
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        if last - first != len(places):
            msg = (
                f"attention_mask of row {row} is zero inside of the row; a sequence that is cut over ranks takes "
                "padding at its ends, and documents by position_ids that begin anew"
            )
            raise UsageError(msg)
        found.append((first, last))
    return found


def _clipped(spans: Sequence[Range], kept: Range) -> list[Range]:
    ranges = ((max(start, kept[0]), min(end, kept[1])) for start, end in spans)
    return [(start, end) for start, end in ranges if start < end]
