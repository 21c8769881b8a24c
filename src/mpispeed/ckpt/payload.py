"""Elements of model.h5 as plain bytes at known offsets: writing, reading, and their checksums."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mpispeed.base.errors import CheckpointError, StoreError
from mpispeed.ckpt import bits, schema
from mpispeed.ckpt.errors import CorruptCheckpoint
from mpispeed.ckpt.hdf5 import write_at
from mpispeed.ckpt.logical import LogicalTensor, Piece
from mpispeed.ckpt.manifest import FileRecord
from mpispeed.ckpt.model_file import Offsets, StoredTensor
from mpispeed.native.checksum import crc32c, crc32c_combine

#: share of the blocks that a sampled read-back checks
_SAMPLE = 0.01
_TABLE_DTYPE = np.dtype("<u4")


def write_pieces(path: Path, tensors: Sequence[LogicalTensor], offsets: Offsets) -> np.ndarray:
    """Write this rank's pieces at their places and wait until they are on the disk.

    Shapes:
        result: int64 [segments, 4], rows (tensor, first byte, bytes, crc32c); no segment crosses a block.

    Raises:
        CheckpointError: the file system refuses, or deferred elements cannot be read; names the tensor and the range.
    """
    rows: list[tuple[int, int, int, int]] = []
    handle = os.open(path, os.O_WRONLY)
    try:
        for index, tensor in enumerate(tensors):
            for piece in tensor.pieces:
                try:
                    rows.extend((index, *row) for row in _write_piece(handle, int(offsets.data[index]), tensor, piece))
                except (OSError, StoreError) as failure:
                    msg = f"writing {tensor.label}[{piece.start}:{piece.stop}] to {path}: {failure}"
                    raise CheckpointError(msg) from failure
        os.fsync(handle)
    finally:
        os.close(handle)
    return np.array(rows, np.int64).reshape(-1, 4)


def _write_piece(handle: int, offset: int, tensor: LogicalTensor, piece: Piece) -> Iterator[tuple[int, int, int]]:
    if piece.start == piece.stop:
        return
    position, end = piece.start * tensor.itemsize, piece.stop * tensor.itemsize
    with contextlib.closing(piece.parts()) as parts:
        for part in parts:
            data, done = bits.as_bytes(part), 0
            if position + len(data) > end:
                break  # it would be written over the neighbour
            while done < len(data):
                chunk = data[done : done + schema.BLOCK_BYTES - position % schema.BLOCK_BYTES]
                yield position, len(chunk), crc32c(chunk)
                write_at(handle, chunk, offset + position)
                position, done = position + len(chunk), done + len(chunk)
    if position != end:
        msg = f"the elements of {tensor.label} that are read when they are written are not those of the piece: they "
        msg += f"do not end at {piece.stop}"
        raise CheckpointError(msg)


def read_at(handle: int, data: memoryview, offset: int) -> int:
    """Fill `data` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(data):
        count = os.preadv(handle, [data[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


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
    return np.array(table, _TABLE_DTYPE)


def write_tables(path: Path, offsets: Offsets, tables: Sequence[np.ndarray]) -> None:
    """Write the checksum tables at their places and wait until they are on the disk.

    Raises:
        OSError: the file system refuses.
    """
    handle = os.open(path, os.O_WRONLY)
    try:
        for offset, table in zip(offsets.tables.tolist(), tables, strict=True):
            if len(table):
                write_at(handle, memoryview(table.tobytes()), offset)
        os.fsync(handle)
    finally:
        os.close(handle)


def model_record(
    path: Path, tensors: Sequence[LogicalTensor], offsets: Offsets, tables: Sequence[np.ndarray]
) -> FileRecord:
    """Size and checksums of a finished model.h5; reads the index only, the elements are known by their tables."""
    stored = sorted(
        (int(offsets.data[i]), tensor.size_bytes, i) for i, tensor in enumerate(tensors) if tensor.size_bytes
    )
    size = path.stat().st_size
    whole = index = position = 0
    extents: list[tuple[int, int]] = []
    handle = os.open(path, os.O_RDONLY)
    try:
        for offset, length, which in [*stored, (size, 0, -1)]:
            if offset > position:
                crc = checksum_of(handle, position, offset - position)
                extents.append((position, offset - position))
                whole = crc32c_combine(whole, crc, offset - position)
                index = crc32c_combine(index, crc, offset - position)
            if which >= 0:
                whole = _extend(whole, tables[which], length)
            position = offset + length
    finally:
        os.close(handle)
    return FileRecord(size, whole, tuple(extents), index)


def _extend(crc: int, table: np.ndarray, size_bytes: int) -> int:
    for block, block_crc in enumerate(table.tolist()):
        crc = crc32c_combine(crc, block_crc, min(schema.BLOCK_BYTES, size_bytes - block * schema.BLOCK_BYTES))
    return crc


def plain_record(path: Path) -> FileRecord:
    """Size and checksum of a file, by reading all of it."""
    size = path.stat().st_size
    handle = os.open(path, os.O_RDONLY)
    try:
        return FileRecord(size, checksum_of(handle, 0, size))
    finally:
        os.close(handle)


def checksum_of(handle: int, start: int, length: int, value: int = 0) -> int:
    """Continue the checksum `value` over a range of an open file, in bounded memory.

    Raises:
        EOFError: the file ends before the range does.
    """
    buffer = memoryview(bytearray(min(length, schema.BLOCK_BYTES)))
    done = 0
    while done < length:
        chunk = buffer[: min(length - done, schema.BLOCK_BYTES)]
        if read_at(handle, chunk, start + done) < len(chunk):
            msg = f"the file ends before byte {start + length}"
            raise EOFError(msg)
        value = crc32c(chunk, value)
        done += len(chunk)
    return value


def read_table(handle: int, path: Path, tensor: StoredTensor) -> np.ndarray:
    """The checksums of a stored tensor.

    Shapes:
        result: uint32 [blocks]

    Raises:
        CorruptCheckpoint: the file ends too early.
    """
    table = np.zeros(schema.block_count(tensor.size_bytes), _TABLE_DTYPE)
    if len(table) and read_at(handle, table.data.cast("B"), tensor.table_offset) < table.nbytes:
        msg = f"{path} is truncated in the checksums of {tensor.name}/{tensor.slot}"
        raise CorruptCheckpoint(msg)
    return table


def check_block(path: Path, tensor: StoredTensor, block: int, data: memoryview, expected: int) -> None:
    """Compare a block that was read with its checksum.

    Raises:
        CorruptCheckpoint: names file, tensor, flat range and offset.
    """
    if crc32c(data) == expected:
        return
    raise damaged(path, tensor, block, "does not match its checksum")


def damaged(path: Path, tensor: StoredTensor, block: int, what: str) -> CorruptCheckpoint:
    """The error for a block of a tensor that cannot be trusted."""
    first = block * schema.BLOCK_BYTES // tensor.itemsize
    last = min(tensor.numel, (block + 1) * schema.BLOCK_BYTES // tensor.itemsize)
    place = tensor.offset + block * schema.BLOCK_BYTES
    msg = (
        f"{path} is damaged: {tensor.name}/{tensor.slot}[{first}:{last}] (flat elements, at byte {place}) {what}; "
        "load another tag"
    )
    return CorruptCheckpoint(msg)


def read_back(path: Path, tensors: Sequence[StoredTensor], *, is_full: bool, seed: str) -> None:
    """Read blocks of a finished file and compare them with their checksums.

    Args:
        path: model.h5.
        tensors: what it holds.
        is_full: True for all blocks, False for a sample of 1 % and at least one.
        seed: chooses the sample.

    Raises:
        CorruptCheckpoint: names the first block that differs.
    """
    blocks = [(tensor, block) for tensor in tensors for block in range(schema.block_count(tensor.size_bytes))]
    if not is_full and blocks:
        chosen = random.Random(seed).sample(range(len(blocks)), max(1, round(len(blocks) * _SAMPLE)))
        blocks = [blocks[i] for i in sorted(chosen)]
    buffer = memoryview(bytearray(schema.BLOCK_BYTES))
    handle = os.open(path, os.O_RDONLY)
    try:
        for tensor, block in blocks:
            data = buffer[: min(schema.BLOCK_BYTES, tensor.size_bytes - block * schema.BLOCK_BYTES)]
            if read_at(handle, data, tensor.offset + block * schema.BLOCK_BYTES) < len(data):
                raise damaged(path, tensor, block, "is cut off")
            check_block(path, tensor, block, data, int(read_table(handle, path, tensor)[block]))
    finally:
        os.close(handle)
