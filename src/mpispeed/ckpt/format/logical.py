"""Logical tensors: names, full shapes, the flat pieces that each rank holds, and tables of their ranges. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema

if TYPE_CHECKING:
    import torch
    from torch import nn

COLUMNS = 5
TENSOR, START, STOP, STRIDE, COUNT = range(COLUMNS)
"""Columns of a table of ranges. A row is equal, equally spaced runs: the elements
[START + i * STRIDE, STOP + i * STRIDE) of a tensor for each i below COUNT. A plain range has stride 0 and count 1."""

#: pieces of on average less than this are brought together before they are written
_SHORT_BYTES = 64 << 10

ALL_EXPERTS = -1
"""As number of an expert: a tensor of all experts, one behind the other along its first dim."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Elements that are read into memory as they are written, a part at a time.

    Attributes:
        numel: number of elements.
        dtype: their torch dtype.
        parts: `parts(first, last)` yields the elements [first, last) in order, as flat tensors like those of `Piece`;
            each is valid until the next is requested. Called by `save`, on this rank alone, for each part once and in
            order, and before that once more where copies are compared; its errors make the save fail on every rank.
        is_in_memory: `parts` reads no file, so that the elements can be copied for a save in the background.
    """

    numel: int
    dtype: torch.dtype
    parts: Callable[[int, int], Iterator[torch.Tensor]]
    is_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """Positions of elements in repeated runs, as of a slice along a later dim: the same runs in every period.

    Attributes:
        period: elements of the whole tensor from the beginning of one repetition to that of the next.
        runs: (first element, elements) within a period; ascending and apart, the first at 0.
    """

    period: int
    runs: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of one repetition."""
        return sum(count for _, count in self.runs)

    def before(self, offset: int) -> int:
        """Number of elements of a repetition before `offset` of its period."""
        return sum(min(max(offset - first, 0), count) for first, count in self.runs)

    def runs_from(self, start: int, numel: int) -> Iterator[tuple[int, int]]:
        """(first element, elements) of every run of `numel` elements that begin at `start`, whole repetitions."""
        for turn in range(numel // self.numel):
            for first, count in self.runs:
                yield start + turn * self.period + first, count

    def problem(self) -> str:
        """A sentence if the pattern is invalid, else ""."""
        end = 0
        for number, (first, count) in enumerate(self.runs):
            if count < 1 or first < end or (number == 0 and first):
                return f"has the runs {self.runs}; they must ascend from 0, apart and none empty"
            end = first + count
        return "" if self.runs and end <= self.period else f"has runs up to {end} in periods of {self.period} elements"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a logical tensor that this rank contributes: a flat range, or runs that repeat.

    Attributes:
        start: first element in the row-major order of the whole tensor.
        values: the elements in order, in memory or deferred.
        is_replica: another rank writes the same elements; this copy is only compared with them.
        pattern: positions of the elements, beginning at `start`; None for one range.

    Shapes:
        values: one-dimensional, contiguous, on the CPU, of the logical tensor's dtype; with a pattern whole
            repetitions of it.
    """

    start: int
    values: torch.Tensor | Deferred
    is_replica: bool = False
    pattern: Pattern | None = None

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.values.numel if isinstance(self.values, Deferred) else self.values.numel()

    @property
    def stop(self) -> int:
        """One past the last element, in the order of the whole tensor."""
        if self.pattern is None or not self.count:
            return self.start + self.count
        turns, (first, count) = self.count // self.pattern.numel, self.pattern.runs[-1]
        return self.start + (turns - 1) * self.pattern.period + first + count

    def before(self, position: int) -> int:
        """Number of its elements before `position` of the whole tensor."""
        offset = max(position - self.start, 0)
        if self.pattern is not None:
            turns, within = divmod(offset, self.pattern.period)
            offset = turns * self.pattern.numel + self.pattern.before(within)
        return min(offset, self.count)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first element, elements) of every run, in the order of the whole tensor."""
        if self.pattern is None:
            yield self.start, self.count
        else:
            yield from self.pattern.runs_from(self.start, self.count)

    def rows(self, tensor: int) -> Iterator[tuple[int, int, int, int, int]]:
        """The elements as rows of `ranges`."""
        if self.pattern is None:
            yield tensor, self.start, self.start + self.count, 0, 1
            return
        for first, count in self.pattern.runs:
            start, turns = self.start + first, self.count // self.pattern.numel
            yield tensor, start, start + count, self.pattern.period, turns

    def parts(self, first: int, last: int) -> Generator[torch.Tensor, None, None]:
        """The values [first, last), in order; each part is valid until the next is requested."""
        if isinstance(self.values, Deferred):
            yield from self.values.parts(first, last)
        else:
            yield self.values[first:last]


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """One dataset of the checkpoint: a whole, unpadded tensor and this rank's pieces of it.

    Attributes:
        name: name of the parameter or buffer; the same on every rank.
        slot: "master", "weight16", an optimizer slot, or "buffer".
        shape: shape of the whole tensor.
        dtype: torch dtype or its name; kept as the name.
        pieces: ranges this rank writes; empty when it writes none.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str | torch.dtype
    pieces: Sequence[Piece] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", schema.dtype_name(self.dtype))
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    @property
    def dtype_name(self) -> str:
        """Name of the dtype."""
        return str(self.dtype)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return schema.STORAGE[self.dtype_name].itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"{self.name}/{self.slot}"

    def identity(self) -> tuple[str, str, tuple[int, ...], str]:
        """Attributes that have to be equal on all ranks."""
        return (self.name, self.slot, self.shape, self.dtype_name)


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """Attributes of `/params/{name}`: everything about a parameter but its elements.

    Attributes:
        name: name of the parameter in the model.
        shape: whole, unpadded shape.
        train_dtype: dtype in which the model uses it; a torch dtype or its name, kept as the name.
        kind: "trainable" or "frozen".
        param_group: index of its parameter group, -1 when it is in none.
        step: updates it has received.
        tp_kind: slicing by tensor parallelism: none, column, row, replicated, averaged, sub, vocab, or own: by the
            model's code.
        tp_dim: the sliced dim, -1 for none.
        tp_sub_sizes: sizes of the parts along `tp_dim` that are sliced separately; for kind own, of the ranks' slices.
        tp_grains: one for each part (one where there are no sub sizes): slices begin at multiples of it, as on whole
            heads; empty for 1 everywhere.
        vocab_size: rows without padding, -1 when it is no vocabulary table.
        pp_kind: "owned" by one pipeline stage or "replicated".
        pp_layer: global index of its pipeline layer, -1 for none.
        expert: (global id, number of experts), or None; (ALL_EXPERTS, number) where the first dim is that of experts.
        is_sparse: True if its gradient is exchanged by rows.
        scalars: optimizer state that is one number per parameter.
    """

    name: str
    shape: tuple[int, ...]
    train_dtype: str | torch.dtype = "float32"
    kind: str = "trainable"
    param_group: int = -1
    step: int = 0
    tp_kind: str = "none"
    tp_dim: int = -1
    tp_sub_sizes: tuple[int, ...] = ()
    tp_grains: tuple[int, ...] = ()
    vocab_size: int = -1
    pp_kind: str = "owned"
    pp_layer: int = -1
    expert: tuple[int, int] | None = None
    is_sparse: bool = False
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "train_dtype", schema.dtype_name(self.train_dtype))
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    def identity(self) -> tuple[object, ...]:
        """Attributes that have to be equal on all ranks."""
        own = (self.name, self.shape, str(self.train_dtype), self.kind, self.param_group, self.step)
        cut = (self.tp_kind, self.tp_dim, self.tp_sub_sizes, self.tp_grains, self.vocab_size)
        return (
            *own,
            *cut,
            self.pp_kind,
            self.pp_layer,
            self.expert,
            self.is_sparse,
            tuple(sorted(self.scalars.items())),
        )


def expert_problem(expert: Sequence[int] | None, shape: Sequence[int]) -> str:
    """What is wrong with `ParamInfo.expert` of a parameter of some shape; "" if nothing is."""
    if expert is None:
        return ""
    if len(expert) != 2 or not ALL_EXPERTS <= expert[0] < expert[1] or expert[1] < 1:
        return f"expert is {tuple(expert)!r:.80}, not the number of an expert and how many there are"
    if expert[0] == ALL_EXPERTS and tuple(shape[:1]) != tuple(expert[1:]):
        return (
            f"it is said to be of all {expert[1]} experts, along its first dim, and its shape is {tuple(shape)!r:.80}"
        )
    return ""


def check_names(params: Sequence[ParamInfo], tensors: Sequence[LogicalTensor]) -> None:
    """Check that names are unique, every slot belongs to a described parameter, and numbers of experts are some.

    Raises:
        CheckpointError: names the first that is not so.
    """
    described: set[str] = set()
    for param in params:
        if param.name in described:
            msg = f"parameter {param.name!r} is described twice"
            raise CheckpointError(msg)
        described.add(param.name)
        problem = expert_problem(param.expert, param.shape)
        if problem:
            msg = f"parameter {param.name!r}: {problem}"
            raise CheckpointError(msg)
    seen: set[tuple[str, str]] = set()
    for tensor in tensors:
        if (tensor.name, tensor.slot) in seen:
            msg = f"tensor {tensor.label} is passed twice; tied parameters are stored once and listed as aliases"
            raise CheckpointError(msg)
        seen.add((tensor.name, tensor.slot))
        if tensor.slot != schema.BUFFER_SLOT and tensor.name not in described:
            msg = f"tensor {tensor.label} belongs to no described parameter; pass a ParamInfo for {tensor.name!r}"
            raise CheckpointError(msg)


def check_pieces(tensors: Sequence[LogicalTensor]) -> None:
    """Check that this rank's pieces are inside their tensors and flat CPU memory of the right dtype.

    Raises:
        CheckpointError: names the first piece that does not.
    """
    for tensor in tensors:
        for piece in tensor.pieces:
            problem = _piece_problem(tensor, piece)
            if problem:
                msg = f"tensor {tensor.label}: the piece at element {piece.start} {problem}"
                raise CheckpointError(msg)
        _check_order(tensor)


def _piece_problem(tensor: LogicalTensor, piece: Piece) -> str:
    values = piece.values
    if not isinstance(values, Deferred):
        if values.dim() != 1 or not values.is_contiguous():
            return f"has shape {tuple(values.shape)} and strides {values.stride()}; pass a flat contiguous tensor"
        if values.device.type != "cpu":
            return f"is on {values.device}; copy it to the CPU first"
    pattern = piece.pattern
    if pattern is not None and (pattern.problem() or piece.count % pattern.numel):
        return pattern.problem() or f"has {piece.count} elements, no multiple of the {pattern.numel} of its pattern"
    name = str(values.dtype).removeprefix("torch.")
    if name != tensor.dtype_name:
        return f"has dtype {name}, the tensor {tensor.dtype_name}; convert it or declare that dtype"
    if piece.start < 0 or piece.stop > tensor.numel:
        return f"ends at {piece.stop}, outside the {tensor.numel} elements of shape {tensor.shape}"
    return ""


def _check_order(tensor: LogicalTensor) -> None:
    """Check that no other piece of this rank is between the runs of a piece, so that it can be sent at once."""
    if all(piece.pattern is None for piece in tensor.pieces):
        return
    own = sorted((piece.start, piece.stop) for piece in tensor.pieces if piece.count and not piece.is_replica)
    for (start, stop), (other, _) in itertools.pairwise(own):
        if other < stop:
            msg = f"tensor {tensor.label}: the piece at element {other} begins between the first and the last element "
            msg += f"of that at {start}; make one piece of both, or cut one into pieces that do not enclose another"
            raise CheckpointError(msg)


def local_ranges(tensors: Sequence[LogicalTensor]) -> np.ndarray:
    """Elements that this rank writes, as rows of `ranges`.

    Shapes:
        result: int64 [rows, 5]
    """
    pieces = ((i, piece) for i, tensor in enumerate(tensors) for piece in tensor.pieces if not piece.is_replica)
    return range_table(row for i, piece in pieces for row in piece.rows(i))


def check_coverage(tensors: Sequence[LogicalTensor], ranges_by_rank: Sequence[np.ndarray]) -> None:
    """Check that the pieces of all ranks cover every tensor exactly once.

    Raises:
        CheckpointError: names the tensor, the range, and the ranks that overlap.
    """
    rows, ranks = joined_ranges(ranges_by_rank)
    firsts = np.searchsorted(rows[:, TENSOR], np.arange(len(tensors) + 1))
    passed: set[tuple[int, bytes, bytes]] = set()
    for index, tensor in enumerate(tensors):
        own = slice(firsts[index], firsts[index + 1])
        # Slots of a parameter have the same pieces, and many small pieces take long to check.
        key = (tensor.numel, rows[own, START:].tobytes(), ranks[own].tobytes())
        if key not in passed:
            source, starts, stops = expanded_runs(rows[own])
            _check_cover(tensor, starts, stops, ranks[own][source])
            passed.add(key)


def _check_cover(tensor: LogicalTensor, starts: np.ndarray, stops: np.ndarray, ranks: np.ndarray) -> None:
    begins = np.concatenate([starts, [tensor.numel]])
    ends = np.concatenate([[0], stops])
    wrong = np.flatnonzero(begins != ends)
    if len(wrong) == 0:
        return
    at = int(wrong[0])
    if begins[at] > ends[at]:
        msg = f"tensor {tensor.label} has a hole: no rank passed the elements [{ends[at]}, {begins[at]})"
        raise CheckpointError(msg)
    overlap = f"[{begins[at]}, {min(int(ends[at]), int(stops[at]))})"
    who = f"ranks {ranks[at - 1]} and {ranks[at]}" if ranks[at - 1] != ranks[at] else f"rank {ranks[at]} twice"
    msg = f"tensor {tensor.label} overlaps: the elements {overlap} were passed by {who}; exactly one rank may"
    raise CheckpointError(msg)


def first_difference(mine: Sequence[object], reference: Sequence[object]) -> str:
    """Describe the first entry in which two lists of identities differ, or ""."""
    for index, (own, other) in enumerate(zip(mine, reference, strict=False)):
        if own != other:
            return f"entry {index} is {own} here and {other} on rank 0"
    if len(mine) != len(reference):
        return f"{len(mine)} entries here and {len(reference)} on rank 0"
    return ""


def range_table(rows: Iterable[tuple[int, int, int, int, int]]) -> np.ndarray:
    """The rows that are not empty.

    Shapes:
        result: int64 [rows, 5]
    """
    made = np.array(list(rows), np.int64).reshape(-1, COLUMNS)
    kept: np.ndarray = made[(made[:, START] < made[:, STOP]) & (made[:, COUNT] > 0)]
    return kept


def joined_ranges(tables: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tables of all ranks as one sorted by tensor, and the rank of each row.

    Shapes:
        result: int64 [rows, 5], int64 [rows]
    """
    kept = list(tables)
    counts = [len(one) for one in kept]
    rows = np.concatenate([np.empty((0, COLUMNS), np.int64), *kept])
    ranks = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(rows[:, TENSOR], kind="stable")
    return rows[order], ranks[order]


def expanded_runs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every single run of a table: the number of its row, its start and its stop; sorted by start, then stop.

    Shapes:
        result: three of int64 [runs]
    """
    counts = rows[:, COUNT]
    source = np.repeat(np.arange(len(rows)), counts)
    turn = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = rows[source, START] + turn * rows[source, STRIDE]
    stops = starts + (rows[source, STOP] - rows[source, START])
    order = np.lexsort((stops, starts))
    return source[order], starts[order], stops[order]


def ranges_meeting(rows: np.ndarray, low: int, high: int) -> np.ndarray:
    """Rows reduced to the full runs that intersect [low, high); rows without any are left out.

    Shapes:
        result: int64 [rows, 5]
    """
    stride = np.maximum(rows[:, STRIDE], 1)
    # run i meets it if its stop is above low and its start below high
    first = np.where(rows[:, STOP] > low, 0, (low - rows[:, STOP]) // stride + 1)
    last = np.where(rows[:, START] < high, (high - 1 - rows[:, START]) // stride + 1, 0)
    last = np.minimum(last, rows[:, COUNT])
    cut = rows.copy()
    cut[:, START] += first * rows[:, STRIDE]
    cut[:, STOP] += first * rows[:, STRIDE]
    cut[:, COUNT] = last - first
    kept: np.ndarray = cut[cut[:, COUNT] > 0]
    return kept


def run_counts(tables: Iterable[np.ndarray], tensors: int) -> np.ndarray:
    """Number of runs of each tensor.

    Shapes:
        result: int64 [tensors]
    """
    counts = np.zeros(tensors, np.int64)
    for one in tables:
        np.add.at(counts, one[:, TENSOR], one[:, COUNT])
    return counts


def finely_cut(tensors: Sequence[LogicalTensor], held: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of the tensors whose runs are too short to be written one by one.

    Shapes:
        result: int64 [tensors that are]
    """
    sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)
    runs = run_counts(held, len(tensors))
    return np.flatnonzero(runs > len(held) + sizes // _SHORT_BYTES)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of the buffers that a state dict holds."""
    names = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in names:
            yield name, buffer
