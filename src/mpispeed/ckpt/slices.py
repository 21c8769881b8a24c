"""Mapping of tensor-parallel slices to whole tensors, for saving and loading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.base.even_split import share
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.logical import Deferred, ParamInfo, Pattern, Piece

if TYPE_CHECKING:
    from mpispeed.ckpt.read.reader import Checkpoint

#: replicated kinds
WHOLE_KINDS = ("none", "replicated", "averaged")
#: sliced kinds, with the default of the sliced dim
CUT_KINDS = {"column": 0, "row": 1, "sub": 0, "vocab": 0, "own": 0}

#: unverified runs of at least so much are read one by one, without what lies between
_LONG_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range of a slice, and its positions in the whole tensor.

    Attributes:
        local: first element in the slice.
        start: first element in the whole tensor.
        count: number of elements.
        pattern: as of `Piece`; None if they are contiguous in the whole tensor too.
    """

    local: int
    start: int
    count: int
    pattern: Pattern | None = None

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first element in the whole tensor, elements) of every run, in order."""
        return (
            iter([(self.start, self.count)]) if self.pattern is None else self.pattern.runs_from(self.start, self.count)
        )


class TensorSlice:
    """The slice of a parameter that one rank of a tensor-parallel group holds.

    Lengths that do not divide evenly are split as by `numpy.array_split`: contiguous parts, the first ones one longer.
    With grains, whole grains are split so; the last one is short if the length is not a multiple. A vocabulary table
    is padded instead: all ranks hold equally many rows, and those after `vocab_size` are not in the whole tensor.
    For kind "sub", each part of `tp_sub_sizes` is sliced separately, and a slice has its shares one after the other, as
    of query, key and value in one tensor. For kind "own" the parts are the ranks' slices, in order.

    Args:
        info: the parameter; kind and dim of the cut are taken from it.
        rank: in the tensor-parallel group.
        size: ranks of the group.
        vocab_rows: rows that each rank holds of a vocabulary table; 0 for as few as hold it.

    Attributes:
        shape: of the slice, with padding.
        stored: elements of the slice that are no padding; they are the first ones.

    Raises:
        CheckpointError: the parameter cannot be cut so; names it and what does not fit.
    """

    def __init__(self, info: ParamInfo, rank: int, size: int, *, vocab_rows: int = 0) -> None:
        if not 0 <= rank < size:
            msg = f"there is no rank {rank} in a tensor-parallel group of {size}"
            raise CheckpointError(msg)
        self.info, self.rank, self.size = info, rank, size
        dim = _dim(info)
        if dim is None:
            self.shape = info.shape
            self._layout(1, info.numel, [(0, info.numel)])
            return
        inner, full = math.prod(info.shape[dim + 1 :]), info.shape[dim]
        if info.tp_kind == "vocab":
            rows = _vocab_rows(info, size, vocab_rows)
            cuts = [(min(rank * rows, full), min((rank + 1) * rows, full))]
        else:
            cuts = list(_cuts(info, dim, rank, size))
            rows = sum(stop - start for start, stop in cuts)
        self.shape = (*info.shape[:dim], rows, *info.shape[dim + 1 :])
        cuts = [(start * inner, stop * inner) for start, stop in cuts]
        self._layout(math.prod(info.shape[:dim]), full * inner, cuts)

    def _layout(self, turns: int, period: int, cuts: list[tuple[int, int]]) -> None:
        """Keep the cuts of each of `turns` periods, those that touch as one."""
        runs: list[tuple[int, int]] = []
        for start, stop in cuts:
            if start == stop:
                continue
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + stop - start)
            else:
                runs.append((start, stop - start))
        if runs == [(0, period)]:
            turns, period, runs = 1, turns * period, [(0, turns * period)]
        self._period, self._runs = period, runs
        self._turn = sum(count for _, count in runs)
        self.stored = turns * self._turn

    @property
    def numel(self) -> int:
        """Elements of the slice, with padding."""
        return math.prod(self.shape)

    @property
    def is_copy(self) -> bool:
        """True if an earlier rank of the group has the same elements, so that this one only passes replicas."""
        return self.rank > 0 and self.info.tp_kind in WHOLE_KINDS

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The elements [start, stop) of the slice in few blocks, in order, without padding."""
        self._check(start, stop)
        stop = min(stop, self.stored)
        if start >= stop:
            return
        turn, into = divmod(start, self._turn)
        last = stop // self._turn
        if into or turn == last:
            yield from self._within(turn, into, min(stop - turn * self._turn, self._turn))
            turn += 1
        if last - turn == 1:
            yield from self._within(turn, 0, self._turn)
        elif last > turn:
            origin = self._runs[0][0]
            pattern = Pattern(self._period, tuple((first - origin, count) for first, count in self._runs))
            count = (last - turn) * self._turn
            yield Block(turn * self._turn, turn * self._period + origin, count, pattern)
        if last >= turn:
            yield from self._within(last, 0, stop - last * self._turn)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The elements [start, stop) of the slice as maximal ranges of the whole tensor, without padding.

        Yields:
            (first element in the slice, first element in the whole tensor, elements), in order.
        """
        held: tuple[int, int, int] | None = None
        for block in self.blocks(start, stop):
            local = block.local
            for first, count in block.runs():
                if held is not None and sum(held[1:]) == first:
                    held = (held[0], held[1], held[2] + count)
                else:
                    if held is not None:
                        yield held
                    held = (local, first, count)
                local += count
        if held is not None:
            yield held

    def _within(self, turn: int, start: int, stop: int) -> Iterator[Block]:
        """The elements [start, stop) of one repetition."""
        done = 0
        for first, count in self._runs:
            low, high = max(start, done), min(stop, done + count)
            if low < high:
                yield Block(turn * self._turn + low, turn * self._period + first + low - done, high - low)
            done += count

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.numel:
            msg = f"[{start}:{stop}] is no range of the {self.numel} elements that rank {self.rank} of {self.size} has "
            msg += f"of {self.info.name}, a slice of shape {self.shape}"
            raise CheckpointError(msg)


def gather_pieces(cut: TensorSlice, start: int, values: torch.Tensor | Deferred) -> list[Piece]:
    """The pieces to save for a flat range of a slice; without padding, as replicas where an earlier rank has the same.

    Args:
        cut: the slice.
        start: first element of `values` in it.
        values: the elements, as of `Piece`; they are not copied.

    Raises:
        CheckpointError: the range leaves the slice.
    """
    count = values.numel if isinstance(values, Deferred) else values.numel()
    made = []
    for block in cut.blocks(start, start + count):
        first = block.local - start
        part = _shifted(values, first, block.count) if isinstance(values, Deferred) else values[first:][: block.count]
        made.append(Piece(block.start, part, cut.is_copy, block.pattern))
    return made


def place_slice(cut: TensorSlice, values: torch.Tensor, whole: torch.Tensor, start: int = 0) -> None:
    """Copy the elements of a slice, from `start` on, to their places in the whole tensor; padding is left out.

    Shapes:
        values: at most [cut.numel - start]
        whole: cut.info.shape, contiguous
    """
    flat = whole.view(-1)
    for block in cut.blocks(start, start + values.numel()):
        part = values[block.local - start :][: block.count]
        if block.pattern is None:
            flat[block.start :][: block.count].copy_(part)
            continue
        turns, at = block.count // block.pattern.numel, 0
        for first, count in block.pattern.runs:
            target = flat[block.start + first :].as_strided((turns, count), (block.pattern.period, 1))
            target.copy_(part.view(turns, -1)[:, at : at + count])
            at += count


def take_slice(cut: TensorSlice, whole: torch.Tensor, values: torch.Tensor, start: int = 0) -> None:
    """The counterpart of `place_slice`: fill `values` with elements of a slice, from `start` on; padding becomes zeros.

    Shapes:
        whole: cut.info.shape, contiguous
        values: at most [cut.numel - start]
    """
    flat, end = whole.view(-1), start
    for block in cut.blocks(start, start + values.numel()):
        part = values[block.local - start :][: block.count]
        end = block.local + block.count
        if block.pattern is None:
            part.copy_(flat[block.start :][: block.count])
            continue
        turns, at = block.count // block.pattern.numel, 0
        for first, count in block.pattern.runs:
            source = flat[block.start + first :].as_strided((turns, count), (block.pattern.period, 1))
            part.view(turns, -1)[:, at : at + count].copy_(source)
            at += count
    values[end - start :].zero_()


def read_slice(
    checkpoint: Checkpoint,
    name: str,
    slot: str,
    cut: TensorSlice,
    start: int,
    out: torch.Tensor,
    *,
    row: int | None = None,
    verify: bool = True,
) -> None:
    """Fill `out` with the flat range of a slice that begins at element `start`; padding becomes zeros.

    Args:
        checkpoint: to read from.
        name: of the parameter in it.
        slot: "master", an optimizer slot or "weight16"; one of the parameter's own shape, or with `row` of one more dim
            before those.
        cut: the slice.
        start: first element of `out` in it.
        out: receives the elements; converted where its dtype is not the stored one.
        row: index of the first dim.
        verify: compare the blocks that are touched with their checksums.

    Shapes:
        out: one-dimensional

    Units: besides `out`, 8 MiB of memory at most.

    Raises:
        CheckpointError: no such tensor, it has another shape than the parameter, or the range leaves the slice.
        CorruptCheckpoint: the bytes are not those that were saved.
    """
    stored = checkpoint.stored(name, slot)
    if (stored.shape if row is None else stored.shape[1:]) != cut.info.shape:
        msg = f"{name}/{slot} is stored in shape {stored.shape} and the parameter {cut.info.name} is of shape "
        msg += f"{cut.info.shape}: it cannot be cut for rank {cut.rank} of {cut.size}"
        raise CheckpointError(msg)
    if out.dim() != 1:
        msg = f"{name}/{slot} cannot be read into a tensor of shape {tuple(out.shape)}; pass a flat one"
        raise CheckpointError(msg)
    end, before = start, (row or 0) * cut.info.numel
    for own in cut.blocks(start, start + out.numel()):
        block = replace(own, start=own.start + before)
        part = out[block.local - start :][: block.count]
        if block.pattern is None:
            checkpoint.read(name, slot, block.start, part, verify)
        else:
            _read_pattern(checkpoint, (name, slot), block, block.pattern, part, verify)
        end = block.local + block.count
    out[end - start :].zero_()


def _read_pattern(
    checkpoint: Checkpoint, key: tuple[str, str], block: Block, pattern: Pattern, out: torch.Tensor, verify: bool
) -> None:
    """Read a block with a pattern: whole repetitions at once, from which runs are copied; long runs one by one."""
    stored = checkpoint.stored(*key)
    longest = schema.BLOCK_BYTES // stored.itemsize
    is_long = not verify and min(count for _, count in pattern.runs) * stored.itemsize >= _LONG_BYTES
    if pattern.period > longest or is_long:
        local = 0
        for first, count in block.runs():
            checkpoint.read(*key, first, out[local : local + count], verify)
            local += count
        return
    turns, (last, count) = block.count // pattern.numel, pattern.runs[-1]
    step = max(1, longest // pattern.period)
    scratch = torch.empty(min(step, turns) * pattern.period, dtype=schema.torch_dtype(stored.dtype))
    for turn in range(0, turns, step):
        many = min(step, turns - turn)
        read = scratch[: (many - 1) * pattern.period + last + count]
        checkpoint.read(*key, block.start + turn * pattern.period, read, verify)
        target, at = out[turn * pattern.numel : (turn + many) * pattern.numel].view(many, pattern.numel), 0
        for first, length in pattern.runs:
            source = scratch[: many * pattern.period].view(many, pattern.period)
            target[:, at : at + length].copy_(source[:, first : first + length])
            at += length


def _shifted(values: Deferred, start: int, count: int) -> Deferred:
    return replace(values, numel=count, parts=lambda first, last: values.parts(start + first, start + last))


def _dim(info: ParamInfo) -> int | None:
    """The sliced dim, or None."""
    if info.tp_kind in WHOLE_KINDS:
        return None
    if info.tp_kind not in CUT_KINDS:
        msg = f"{info.name} has tp_kind {info.tp_kind!r}; known are {', '.join((*WHOLE_KINDS, *CUT_KINDS))}"
        raise CheckpointError(msg)
    dim = CUT_KINDS[info.tp_kind] if info.tp_dim == -1 else info.tp_dim
    if not 0 <= dim < len(info.shape):
        msg = f"{info.name} of shape {info.shape} has no dim {dim} that could be cut (tp_kind {info.tp_kind!r})"
        raise CheckpointError(msg)
    return dim


def _cuts(info: ParamInfo, dim: int, rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges that a rank has along the sliced dim."""
    parts = info.tp_sub_sizes if info.tp_kind in ("sub", "own") else (info.shape[dim],)
    if sum(parts) != info.shape[dim] or min(parts, default=0) < 0:
        msg = f"{info.name}: the tp_sub_sizes {parts} do not add up to the {info.shape[dim]} of dim {dim}"
        raise CheckpointError(msg)
    if info.tp_kind == "own":
        if len(parts) != size:
            msg = f"{info.name} was cut over {len(parts)} ranks by the model's own code and cannot be over {size}"
            raise CheckpointError(msg)
        yield sum(parts[:rank]), sum(parts[: rank + 1])
        return
    grains = info.tp_grains or (1,) * len(parts)
    if len(grains) != len(parts) or min(grains) < 1:
        msg = f"{info.name}: the tp_grains {grains} are not one positive number for each of its parts {parts}"
        raise CheckpointError(msg)
    begin = 0
    for part, grain in zip(parts, grains, strict=True):
        start, stop = share(part, rank, size, grain)
        yield begin + start, begin + stop
        begin += part


def _vocab_rows(info: ParamInfo, size: int, rows: int) -> int:
    """Rows of each rank's slice of a vocabulary table."""
    real = info.shape[0]
    if info.tp_dim not in (-1, 0) or info.vocab_size not in (-1, real):
        msg = f"{info.name} of shape {info.shape} has tp_kind 'vocab', tp_dim {info.tp_dim} and vocab_size "
        msg += f"{info.vocab_size}; a vocabulary is cut along dim 0, and the shape counts the rows without padding"
        raise CheckpointError(msg)
    least = -(-real // size)
    if rows and rows < least:
        msg = f"{info.name} has {real} rows; {size} ranks of {rows} rows cannot hold them"
        raise CheckpointError(msg)
    return rows or least
