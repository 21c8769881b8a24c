"""Elements as plain bytes at known offsets: writing them, and their checksums."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from mpispeed.base.errors import CheckpointError, StoreError
from mpispeed.ckpt import bits, blocks, schema
from mpispeed.ckpt.blocks import TABLE_DTYPE, checksum_of
from mpispeed.ckpt.hdf5 import write_at
from mpispeed.ckpt.index import read_index
from mpispeed.ckpt.logical import LogicalTensor, Piece
from mpispeed.ckpt.manifest import FileRecord
from mpispeed.ckpt.model_file import Places
from mpispeed.native.checksum import crc32c, crc32c_combine

#: share of the blocks that a sampled read-back checks
_SAMPLE = 0.01


def write_pieces(folder: Path, tensors: Sequence[LogicalTensor], places: Places) -> np.ndarray:
    """Write this rank's pieces at their places and wait until they are on the disk.

    Shapes:
        result: int64 [segments, 4], rows (tensor, first byte, bytes, crc32c); no segment crosses a block.

    Raises:
        CheckpointError: the file system refuses, or deferred elements cannot be read; names the tensor and the range.
    """
    rows: list[tuple[int, int, int, int]] = []
    with OpenFiles(folder, places.files) as files:
        for index, tensor in enumerate(tensors):
            for piece in tensor.pieces:
                if piece.is_replica or piece.start == piece.stop:
                    continue
                file, offset = int(places.which[index]), int(places.data[index])
                with naming(tensor, piece.start, piece.stop, folder / places.files[file]):
                    rows.extend((index, *row) for row in _write_piece(files.handle(file), offset, tensor, piece))
        files.sync()
    return np.array(rows, np.int64).reshape(-1, 4)


@contextlib.contextmanager
def naming(tensor: LogicalTensor, start: int, stop: int, path: Path) -> Iterator[None]:
    """Turn a failure of a disk into one that names the tensor, the range of elements and the file."""
    try:
        yield
    except (OSError, StoreError) as failure:
        msg = f"writing {tensor.label}[{start}:{stop}] to {path}: {failure}"
        raise CheckpointError(msg) from failure


class OpenFiles:
    """The files with elements, opened for writing when they are first written to. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._handles: dict[int, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def handle(self, file: int) -> int:
        """The handle of a file by its number."""
        if file not in self._handles:
            self._handles[file] = os.open(self._folder / self._names[file], os.O_WRONLY | os.O_CLOEXEC)
        return self._handles[file]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for file, handle in self._handles.items():
            try:
                os.fsync(handle)
            except OSError as failure:
                msg = f"bringing {self._folder / self._names[file]} to the disk: {failure}"
                raise CheckpointError(msg) from failure


def _write_piece(handle: int, offset: int, tensor: LogicalTensor, piece: Piece) -> Iterator[tuple[int, int, int]]:
    position = piece.start * tensor.itemsize
    with contextlib.closing(checked_parts(tensor, piece, piece.start, piece.stop)) as parts:
        for data in parts:
            yield from write_run(handle, offset, position, data)
            position += len(data)


def write_run(handle: int, offset: int, position: int, data: memoryview) -> Iterator[tuple[int, int, int]]:
    """Write bytes of one tensor, block by block.

    Args:
        handle: of the file.
        offset: where the tensor begins in it.
        position: first byte, counted from the first element of the tensor.
        data: the bytes.

    Yields:
        (first byte, bytes, crc32c); none crosses a block.
    """
    done = 0
    while done < len(data):
        chunk = data[done : done + schema.BLOCK_BYTES - position % schema.BLOCK_BYTES]
        yield position, len(chunk), crc32c(chunk)
        write_at(handle, chunk, offset + position)
        position, done = position + len(chunk), done + len(chunk)


def checked_parts(tensor: LogicalTensor, piece: Piece, start: int, stop: int) -> Generator[memoryview, None, None]:
    """The bytes of the elements [start, stop) of a tensor, which lie in `piece`; exactly as many as there should be.

    Raises:
        CheckpointError: deferred elements are more or fewer than they should be.
    """
    missing = (stop - start) * tensor.itemsize
    with contextlib.closing(piece.parts(start, stop)) as parts:
        for part in parts:
            data = bits.as_bytes(part)
            missing -= len(data)
            if missing < 0:
                break  # it would be written over the neighbour
            yield data
    if missing:
        msg = f"the elements of {tensor.label} that are read when they are written are not those of the piece: they "
        msg += f"do not end at {stop}"
        raise CheckpointError(msg)


def block_tables(tensors: Sequence[LogicalTensor], segments_by_rank: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Join the checksums of all ranks' segments to one per block of every tensor.

    Shapes:
        result: per tensor uint32 [blocks]

    Raises:
        CheckpointError: the bytes written do not cover a tensor exactly once.
    """
    rows = np.concatenate([np.empty((0, 4), np.int64), *segments_by_rank])
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    firsts = np.searchsorted(rows[:, 0], np.arange(len(tensors) + 1))
    return [_join(tensor, rows[firsts[i] : firsts[i + 1]].tolist()) for i, tensor in enumerate(tensors)]


def _join(tensor: LogicalTensor, segments: Sequence[Sequence[int]]) -> np.ndarray:
    table = [0] * schema.block_count(tensor.size_bytes)
    position = 0
    for _, start, length, crc in segments:
        if start != position:
            break
        block = start // schema.BLOCK_BYTES
        table[block] = crc32c_combine(table[block], crc, length) if start % schema.BLOCK_BYTES else crc
        position += length
    if position != tensor.size_bytes:
        msg = f"tensor {tensor.label}: the bytes written stop at {position} of {tensor.size_bytes}"
        raise CheckpointError(msg)
    return np.array(table, TABLE_DTYPE)


def write_tables(model: Path, places: Places, tables: Sequence[np.ndarray]) -> None:
    """Write the checksum tables at their places in model.h5 and wait until they are on the disk.

    Raises:
        OSError: the file system refuses.
    """
    handle = os.open(model, os.O_WRONLY)
    try:
        for offset, table in zip(places.tables.tolist(), tables, strict=True):
            if len(table):
                write_at(handle, memoryview(table.tobytes()), offset)
        os.fsync(handle)
    finally:
        os.close(handle)


def file_record(path: Path, contents: Sequence[tuple[int, int, np.ndarray]]) -> FileRecord:
    """Size and checksums of a finished file; reads the index only, the elements are known by their tables.

    Args:
        path: model.h5 or a data file.
        contents: (offset, bytes, checksums of the blocks) of every tensor whose elements it has.
    """
    size = path.stat().st_size
    whole = index = position = 0
    extents: list[tuple[int, int]] = []
    handle = os.open(path, os.O_RDONLY)
    try:
        for offset, length, table in [*sorted(contents, key=lambda row: row[0]), (size, 0, np.empty(0, np.uint32))]:
            if offset > position:
                crc = checksum_of(handle, position, offset - position)
                extents.append((position, offset - position))
                whole = crc32c_combine(whole, crc, offset - position)
                index = crc32c_combine(index, crc, offset - position)
            whole = _extend(whole, table, length)
            position = offset + length
    finally:
        os.close(handle)
    return FileRecord(size, whole, tuple(extents), index)


def _extend(crc: int, table: np.ndarray, size_bytes: int) -> int:
    for block, block_crc in enumerate(table.tolist()):
        crc = crc32c_combine(crc, block_crc, min(schema.BLOCK_BYTES, size_bytes - block * schema.BLOCK_BYTES))
    return crc


def read_back(folder: Path, data_files: Sequence[str], *, is_full: bool, seed: str) -> None:
    """Read blocks of finished files and compare them with their checksums.

    Args:
        folder: that the files are in.
        data_files: files with elements besides model.h5.
        is_full: True for all blocks, False for a sample of 1 % and at least one.
        seed: chooses the sample.

    Raises:
        CorruptCheckpoint: names the first block that differs.
    """
    tensors = read_index(folder, data_files).tensors.values()
    chosen = [(tensor, block) for tensor in tensors for block in range(schema.block_count(tensor.size_bytes))]
    if not is_full and chosen:
        sample = random.Random(seed).sample(range(len(chosen)), max(1, round(len(chosen) * _SAMPLE)))
        chosen = [chosen[i] for i in sorted(sample)]
    buffer = memoryview(bytearray(schema.BLOCK_BYTES))
    with contextlib.ExitStack() as stack:
        handles: dict[str, int] = {}
        for name in {schema.MODEL_FILE, *(tensor.file for tensor, _ in chosen)}:
            handles[name] = blocks.open_plain(folder / name)
            stack.callback(os.close, handles[name])
        for tensor, block in chosen:
            data, path = buffer[: blocks.block_bytes(tensor, block)], folder / tensor.file
            if blocks.read_at(handles[tensor.file], data, tensor.offset + block * schema.BLOCK_BYTES) < len(data):
                raise blocks.damaged(path, tensor, block, "is cut off")
            table = blocks.read_table(handles[schema.MODEL_FILE], folder / schema.MODEL_FILE, tensor)
            blocks.check_block(path, tensor, block, data, int(table[block]))
