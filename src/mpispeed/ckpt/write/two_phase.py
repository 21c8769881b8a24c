"""Aggregated writing: one rank writes a file, or some tensors of it, in order; the others send it their elements.

All streams advance together in windows. In each, a rank packs its bytes of every stream's window, one all-to-all sends
them to the writers, which write them. Two-phase I/O: Thakur, Gropp and Lusk, "Data sieving and collective I/O in
ROMIO", 1999.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpispeed.ckpt.format import logical, payload, schema
from mpispeed.ckpt.format.errors import PLAIN, SaveFailed
from mpispeed.ckpt.format.logical import LogicalTensor, Piece
from mpispeed.ckpt.format.payload import OpenFiles
from mpispeed.ckpt.format.tag_files import Places

if TYPE_CHECKING:
    from mpispeed.ckpt.format.saving_comm import SavingComm


@dataclass(frozen=True, slots=True)
class Stream:
    """Elements that one rank writes into one file, in file order, without gaps.

    Attributes:
        file: its number.
        tensors: their numbers, in order.
        begins: first byte of each in the stream, and the length of the stream.
        rows: ranges that ranks hold, as rows of `ranges` in bytes of the stream; tensors as indices into `tensors`.
        ranks: the rank of each row.

    Shapes:
        tensors: int64 [n]; begins: int64 [n + 1]; rows: int64 [m, 5]; ranks: int64 [m]
    """

    file: int
    tensors: np.ndarray
    begins: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray

    def window(self, start: int, stop: int) -> np.ndarray:
        """Ranges of ranks within [start, stop), sorted, as rows (first byte, one past the last, rank).

        Shapes:
            result: int64 [runs, 3]
        """
        which = self.rows[:, logical.TENSOR]
        low = np.searchsorted(which, np.searchsorted(self.begins, start, side="right") - 1)
        high = np.searchsorted(which, np.searchsorted(self.begins, stop, side="left"))
        rows = self.rows[low:high].copy()
        rows[:, logical.TENSOR] = self.ranks[low:high]
        rows = logical.ranges_meeting(rows, start, stop)
        source, firsts, lasts = logical.expanded_runs(rows)
        return np.stack([firsts.clip(start), lasts.clip(max=stop), rows[source, logical.TENSOR]], axis=1)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The tensors of [start, stop): (number, first byte, one past the last), counted from each one's own first."""
        first = int(np.searchsorted(self.begins, start, side="right")) - 1
        for place in range(first, len(self.tensors)):
            begin, end = int(self.begins[place]), int(self.begins[place + 1])
            if begin >= stop:
                break
            if max(begin, start) < min(end, stop):
                yield int(self.tensors[place]), max(begin, start) - begin, min(end, stop) - begin


def streams_of(
    tensors: Sequence[LogicalTensor],
    places: Places,
    held: Sequence[np.ndarray],
    lanes: Sequence[tuple[int, np.ndarray]] | None = None,
) -> list[Stream]:
    """The stream of every file, or of every one of `lanes`; the pieces of all ranks cover each exactly once.

    Args:
        tensors: whole tensors.
        places: of the tensors.
        held: elements that each rank holds, as in `logical.local_ranges`.
        lanes: of each stream the number of the file and the tensors, in the order in which they stand in it.
    """
    rows, ranks = logical.joined_ranges(held)
    sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)
    items = np.array([tensor.itemsize for tensor in tensors], np.int64)
    found = []
    for file, order in enumerate(places.streams()) if lanes is None else lanes:
        begins = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64)
        place = np.full(len(tensors), -1, np.int64)
        place[order] = np.arange(len(order))
        own = place[rows[:, logical.TENSOR]] >= 0
        which, scaled = rows[own, logical.TENSOR], rows[own]
        scaled[:, logical.START : logical.COUNT] *= items[which, None]
        scaled[:, logical.START : logical.STRIDE] += begins[place[which], None]
        scaled[:, logical.TENSOR] = place[which]
        sort = np.argsort(scaled[:, logical.TENSOR], kind="stable")
        found.append(Stream(file, order, begins, scaled[sort], ranks[own][sort]))
    return found


def deal(
    tensors: Sequence[LogicalTensor], places: Places, chosen: np.ndarray, size: int
) -> tuple[list[tuple[int, np.ndarray]], list[int]]:
    """Assign tensors to ranks in about equal parts; return `lanes` of `streams_of`, and the rank that writes each."""
    orders = [order[np.isin(order, chosen)] for order in places.streams()]
    sizes = [np.array([tensors[which].size_bytes for which in order.tolist()], np.int64) for order in orders]
    total, done = sum(int(one.sum()) for one in sizes), 0
    lanes: list[tuple[int, np.ndarray]] = []
    writers: list[int] = []
    for file, (order, one) in enumerate(zip(orders, sizes, strict=True)):
        middles = done + np.cumsum(one) - one // 2 - 1
        done += int(one.sum())
        owners = np.minimum(middles * size // max(total, 1), size - 1)
        for owner in np.unique(owners).tolist():
            lanes.append((file, order[owners == owner]))
            writers.append(owner)
    return lanes, writers


def write_through(
    comm: SavingComm,
    folder: Path,
    tensors: Sequence[LogicalTensor],
    places: Places,
    streams: Sequence[Stream],
    writers: Sequence[int],
    window_bytes: int,
) -> np.ndarray:
    """Send the elements of streams to the writers, which write them and wait until they are on the disk.

    A rank packs at most a quarter of `window_bytes` for all streams together; a writer has as much again for what comes
    and for the window itself, and the transport may need the rest.

    Args:
        comm: all ranks that save.
        folder: that the files are in.
        tensors: with this rank's pieces.
        places: of the tensors.
        streams: what is to be written.
        writers: the rank that writes each stream.
        window_bytes: memory of a rank.

    Collective over: comm.

    Shapes:
        result: as `payload.write_pieces`; on each rank what it wrote.

    Raises:
        SaveFailed: on every rank; names the first rank that could not read or write.
    """
    length = max(schema.ALIGN_BYTES, window_bytes // 4 // len(streams) // schema.ALIGN_BYTES * schema.ALIGN_BYTES)
    end = max(int(stream.begins[-1]) for stream in streams)
    own, memory = _own_pieces(tensors), _Memory()
    rows: list[tuple[int, int, int, int]] = []
    with OpenFiles(folder, places.files) as files:
        for start in range(0, end, length):
            packed, sent = torch.empty(0, dtype=torch.uint8), [0] * comm.size
            arrived, counts, cuts = packed, sent, dict[int, np.ndarray]()
            with comm.together(SaveFailed, doing="reading what is to be written", plain=PLAIN):
                packed, sent = _pack(memory, comm.size, tensors, own, streams, writers, start, start + length)
                for number, (stream, writer) in enumerate(zip(streams, writers, strict=True)):
                    if writer == comm.rank:
                        cuts[number] = stream.window(start, start + length)
                counts = _counts(cuts, comm.size)
                arrived = memory.take("arrived", sum(counts))
            comm.all_to_all(arrived, packed, counts, sent)
            with comm.together(SaveFailed, doing="writing the checkpoint", plain=PLAIN):
                for window in _unpack(memory, arrived, counts, streams, cuts, start):
                    rows.extend(_write_window(files, tensors, places, window))
        with comm.together(SaveFailed, doing="writing the checkpoint", plain=PLAIN):
            files.sync()
    return np.array(rows, np.int64).reshape(-1, 4)


def _counts(cuts: Mapping[int, np.ndarray], size: int) -> list[int]:
    """Number of bytes from each rank."""
    came = sum((np.bincount(cut[:, 2], cut[:, 1] - cut[:, 0], size) for cut in cuts.values()), np.zeros(size))
    counts: list[int] = np.asarray(came).astype(np.int64).tolist()
    return counts


class _Memory:
    """Buffers reused in every window; new memory has to be mapped page by page, which is slower."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, use: str, size: int) -> torch.Tensor:
        """A buffer of `size` bytes, valid until the next one for the same use."""
        if use not in self._held or self._held[use].numel() < size:
            self._held.pop(use, None)  # the old one goes first
            self._held[use] = torch.empty(size, dtype=torch.uint8)
        return self._held[use][:size]


def _own_pieces(tensors: Sequence[LogicalTensor]) -> list[list[Piece]]:
    return [sorted((p for p in t.pieces if p.count and not p.is_replica), key=lambda p: p.start) for t in tensors]


def _pack(
    memory: _Memory,
    size: int,
    tensors: Sequence[LogicalTensor],
    own: Sequence[Sequence[Piece]],
    streams: Sequence[Stream],
    writers: Sequence[int],
    start: int,
    stop: int,
) -> tuple[torch.Tensor, list[int]]:
    """This rank's bytes of the windows [start, stop), by writer, stream and place; and the bytes for each rank."""
    found: list[tuple[int, LogicalTensor, Piece, int, int]] = []
    sent = [0] * size
    for number in sorted(range(len(streams)), key=lambda number: (writers[number], number)):
        for which, low, high in streams[number].within(start, stop):
            for piece in own[which]:
                first, last = _held_bytes(piece, tensors[which].itemsize, low, high)
                if first < last:
                    found.append((which, tensors[which], piece, first, last))
                    sent[writers[number]] += last - first
    packed = memory.take("packed", sum(sent))
    target, done = packed.numpy().data, 0
    for _, tensor, piece, first, last in found:
        for data in _bytes_of(tensor, piece, first, last):
            target[done : done + len(data)] = data
            done += len(data)
    return packed, sent


def _held_bytes(piece: Piece, itemsize: int, low: int, high: int) -> tuple[int, int]:
    """Range of a piece's own bytes within the bytes [low, high) of its tensor, which may end inside an element."""
    ends = []
    for position in (low, high):
        element, inside = divmod(position, itemsize)
        before = piece.before(element)
        has_element = inside > 0 and piece.before(element + 1) > before
        ends.append(before * itemsize + (inside if has_element else 0))
    return ends[0], ends[1]


def _bytes_of(tensor: LogicalTensor, piece: Piece, first: int, last: int) -> Iterator[memoryview]:
    """The bytes [first, last) of a piece; whole elements are read, and bytes outside of the range are left out."""
    start, stop = first // tensor.itemsize, -(-last // tensor.itemsize)
    position = start * tensor.itemsize
    with contextlib.closing(payload.checked_parts(tensor, piece, start, stop)) as parts:
        for data in parts:
            yield data[max(0, first - position) : last - position]
            position += len(data)


@dataclass(frozen=True, slots=True)
class _Window:
    stream: Stream
    start: int
    data: memoryview


def _unpack(
    memory: _Memory,
    arrived: torch.Tensor,
    came: Sequence[int],
    streams: Sequence[Stream],
    cuts: Mapping[int, np.ndarray],
    start: int,
) -> Iterator[_Window]:
    """Assembled windows of the streams that this rank writes; each is valid until the next is requested."""
    source = arrived.numpy().data
    at = np.concatenate([[0], np.cumsum(came)]).astype(np.int64).tolist()
    for number, cut in cuts.items():
        if not len(cut):
            continue
        window = memory.take("window", int(cut[-1, 1]) - start).numpy().data
        for first, last, rank in cut.tolist():
            window[first - start : last - start] = source[at[rank] : at[rank] + last - first]
            at[rank] += last - first
        yield _Window(streams[number], start, window)


def _write_window(
    files: OpenFiles, tensors: Sequence[LogicalTensor], places: Places, window: _Window
) -> Iterator[tuple[int, int, int, int]]:
    """Write a window tensor by tensor; rows as in `payload.write_pieces`."""
    done = 0
    for which, low, high in window.stream.within(window.start, window.start + len(window.data)):
        target = payload.Target(files, window.stream.file, int(places.data[which]), tensors[which])
        for row in payload.write_run(target, low, window.data[done : done + high - low]):
            yield (which, *row)
        done += high - low
    files.settle()  # the memory of this window is used for the next
