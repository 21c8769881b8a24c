"""Aggregated writing: one rank per file writes it from front to back; the others bring it their pieces.

All files advance together in windows. In each, a rank packs what it has of every file's window, one all-to-all brings
it to the writers, and they put it at its place. Two-phase I/O: Thakur, Gropp and Lusk, "Data sieving and collective I/O
in ROMIO", 1999.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import payload, schema
from mpispeed.ckpt.logical import LogicalTensor, Piece
from mpispeed.ckpt.model_file import Places
from mpispeed.ckpt.request import together

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


@dataclass(frozen=True, slots=True)
class Stream:
    """The elements of one file in the order in which they stand in it, without what lies between them.

    Attributes:
        file: its number.
        tensors: their numbers, in order.
        begins: first byte of each in the stream, and the length of the stream.
        rows: what ranks have of it, as rows (first byte, one past the last, rank, tensor), sorted.

    Shapes:
        tensors: int64 [n]; begins: int64 [n + 1]; rows: int64 [pieces, 4]
    """

    file: int
    tensors: np.ndarray
    begins: np.ndarray
    rows: np.ndarray

    def window(self, start: int, stop: int) -> np.ndarray:
        """The rows that meet [start, stop), cut to it."""
        if not len(self.rows):
            return self.rows
        first = int(np.searchsorted(self.rows[:, 1], start, side="right"))
        last = int(np.searchsorted(self.rows[:, 0], stop, side="left"))
        rows: np.ndarray = self.rows[first:last].copy()
        np.clip(rows[:, :2], start, stop, out=rows[:, :2])
        return rows


def streams_of(tensors: Sequence[LogicalTensor], places: Places, ranges: Sequence[np.ndarray]) -> list[Stream]:
    """The stream of every file; the pieces of all ranks cover each exactly once."""
    counts = [len(table) for table in ranges]
    ranks = np.repeat(np.arange(len(counts)), counts)
    table = np.concatenate([np.empty((0, 3), np.int64), *ranges])
    sizes = np.array([tensor.size_bytes for tensor in tensors], np.int64)
    items = np.array([tensor.itemsize for tensor in tensors], np.int64)
    found = []
    for file, order in enumerate(places.streams()):
        begins = np.concatenate([[0], np.cumsum(sizes[order])]).astype(np.int64)
        at = np.zeros(len(tensors), np.int64)
        at[order] = begins[:-1]
        mine = places.which[table[:, 0]] == file
        which = table[mine, 0]
        first, last = (at[which] + table[mine, side] * items[which] for side in (1, 2))
        rows = np.stack([first, last, ranks[mine], which], axis=1)
        found.append(Stream(file, order, begins, rows[np.argsort(rows[:, 0], kind="stable")]))
    return found


def write_through(
    comm: Comm,
    folder: Path,
    tensors: Sequence[LogicalTensor],
    places: Places,
    ranges: Sequence[np.ndarray],
    writers: Sequence[int],
    window_bytes: int,
) -> np.ndarray:
    """Bring all elements to the writers, which write them and wait until they are on the disk.

    A rank packs at most a quarter of `window_bytes` for all files together; a writer has as much again for what comes
    and for the window itself, and the transport may need the rest.

    Args:
        comm: all ranks that save.
        folder: that the files are in.
        tensors: with this rank's pieces.
        places: of the tensors.
        ranges: what every rank has, as in `logical.local_ranges`.
        writers: the rank that writes each file.
        window_bytes: memory of a rank.

    Collective over: comm.

    Shapes:
        result: as `payload.write_pieces`; on each rank what it wrote.

    Raises:
        SaveFailed: on every rank; names the first rank that could not read or write.
    """
    streams = streams_of(tensors, places, ranges)
    length = max(schema.ALIGN_BYTES, window_bytes // 4 // len(streams) // schema.ALIGN_BYTES * schema.ALIGN_BYTES)
    end = max(int(stream.begins[-1]) for stream in streams)
    rows: list[tuple[int, int, int, int]] = []
    with payload.OpenFiles(folder, places.files) as files:
        for start in range(0, end, length):
            cuts = [stream.window(start, start + length) for stream in streams]
            packed, sent = torch.empty(0, dtype=torch.uint8), [0] * comm.size
            with together(comm, "reading what is to be written"):
                packed, sent = _pack(comm, tensors, streams, cuts, writers)
            came = _counts(comm, cuts, writers)
            arrived = torch.empty(sum(came), dtype=torch.uint8)
            comm.all_to_all(arrived, packed, came, sent)
            with together(comm, "writing the checkpoint"):
                for window in _unpack(comm, arrived, came, streams, cuts, writers, start):
                    rows.extend(_write_window(files, folder, tensors, places, window))
        with together(comm, "writing the checkpoint"):
            files.sync()
    return np.array(rows, np.int64).reshape(-1, 4)


def _pack(
    comm: Comm,
    tensors: Sequence[LogicalTensor],
    streams: Sequence[Stream],
    cuts: Sequence[np.ndarray],
    writers: Sequence[int],
) -> tuple[torch.Tensor, list[int]]:
    """This rank's bytes of all windows, by writer, then file, then place; and how many go to each rank."""
    sent = [0] * comm.size
    order = sorted(range(len(streams)), key=lambda file: (writers[file], file))
    for file in order:
        own = cuts[file][cuts[file][:, 2] == comm.rank]
        sent[writers[file]] += int((own[:, 1] - own[:, 0]).sum())
    packed = torch.empty(sum(sent), dtype=torch.uint8)
    target, done = packed.numpy().data, 0
    for file in order:
        for first, last, rank, which in cuts[file].tolist():
            if rank == comm.rank:
                for data in _bytes_of(tensors[which], streams[file], which, first, last):
                    target[done : done + len(data)] = data
                    done += len(data)
    return packed, sent


def _bytes_of(tensor: LogicalTensor, stream: Stream, which: int, first: int, last: int) -> Iterator[memoryview]:
    """The bytes [first, last) of a stream, which lie in one of this rank's pieces of `tensor`."""
    begin = int(stream.begins[int(np.flatnonzero(stream.tensors == which)[0])])
    low, high = first - begin, last - begin
    # A window may end inside of an element: whole elements are read, and what belongs to its neighbour is left out.
    start, stop = low // tensor.itemsize, -(-high // tensor.itemsize)
    piece = _piece_with(tensor, start, stop)
    position = start * tensor.itemsize
    with contextlib.closing(payload.checked_parts(tensor, piece, start, stop)) as parts:
        for data in parts:
            yield data[max(0, low - position) : high - position]
            position += len(data)


def _piece_with(tensor: LogicalTensor, start: int, stop: int) -> Piece:
    for piece in tensor.pieces:
        if not piece.is_replica and piece.start <= start and stop <= piece.stop:
            return piece
    msg = f"no piece of {tensor.label} has the elements [{start}, {stop})"
    raise CheckpointError(msg)


def _counts(comm: Comm, cuts: Sequence[np.ndarray], writers: Sequence[int]) -> list[int]:
    """How many bytes come from each rank."""
    came = np.zeros(comm.size, np.int64)
    for cut, writer in zip(cuts, writers, strict=True):
        if writer == comm.rank:
            np.add.at(came, cut[:, 2], cut[:, 1] - cut[:, 0])
    counts: list[int] = came.tolist()
    return counts


@dataclass(frozen=True, slots=True)
class _Window:
    stream: Stream
    start: int
    data: memoryview


def _unpack(
    comm: Comm,
    arrived: torch.Tensor,
    came: Sequence[int],
    streams: Sequence[Stream],
    cuts: Sequence[np.ndarray],
    writers: Sequence[int],
    start: int,
) -> Iterator[_Window]:
    """The windows of the files that this rank writes, put together."""
    source = arrived.numpy().data
    at = np.concatenate([[0], np.cumsum(came)]).tolist()
    for stream, cut, writer in zip(streams, cuts, writers, strict=True):
        if writer != comm.rank or not len(cut):
            continue
        window = np.empty(int(cut[-1, 1]) - start, np.uint8).data
        for first, last, rank, _ in cut.tolist():
            window[first - start : last - start] = source[at[rank] : at[rank] + last - first]
            at[rank] += last - first
        yield _Window(stream, start, window)


def _write_window(
    files: payload.OpenFiles, folder: Path, tensors: Sequence[LogicalTensor], places: Places, window: _Window
) -> Iterator[tuple[int, int, int, int]]:
    """Write a window tensor by tensor; rows as in `payload.write_pieces`."""
    begins, stop = window.stream.begins, window.start + len(window.data)
    first = int(np.searchsorted(begins, window.start, side="right")) - 1
    for number in range(first, len(window.stream.tensors)):
        low, high = max(int(begins[number]), window.start), min(int(begins[number + 1]), stop)
        if low >= high:
            break
        which = int(window.stream.tensors[number])
        tensor, position = tensors[which], low - int(begins[number])
        run = window.data[low - window.start : high - window.start]
        elements = position // tensor.itemsize, (position + len(run)) // tensor.itemsize
        with payload.naming(tensor, *elements, folder / places.files[window.stream.file]):
            handle = files.handle(window.stream.file)
            for row in payload.write_run(handle, int(places.data[which]), position, run):
                yield (which, *row)
