"""Reading of checkpoint files, and verification of blocks by their checksums. No torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.format.manifest import FileRecord
from mpispeed.native.checksum import crc32c

TABLE_DTYPE = np.dtype("<u4")


def open_plain(path: Path) -> int:
    """Open an ordinary file for reading; never waits for a pipe, nor follows a symbolic link as the last component.

    Raises:
        CheckpointError: it cannot be opened, or is no ordinary file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        msg = f"{path} cannot be read: {failure.strerror}"
        raise CheckpointError(msg) from failure
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    msg = f"{path} is no ordinary file"
    raise CorruptCheckpoint(msg)


def read_at(handle: int, data: memoryview, offset: int) -> int:
    """Fill `data` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(data):
        count = os.preadv(handle, [data[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


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


def plain_record(path: Path) -> FileRecord:
    """Size and checksum of a file, read in full."""
    size = path.stat().st_size
    handle = os.open(path, os.O_RDONLY)
    try:
        return FileRecord(size, checksum_of(handle, 0, size))
    finally:
        os.close(handle)


def block_bytes(tensor: TensorEntry, block: int) -> int:
    """Bytes of one block of a tensor; the last may be short."""
    return min(schema.BLOCK_BYTES, tensor.size_bytes - block * schema.BLOCK_BYTES)


def read_table(handle: int, path: Path, tensor: TensorEntry) -> np.ndarray:
    """The checksums of a stored tensor, from model.h5.

    Shapes:
        result: uint32 [blocks]

    Raises:
        CorruptCheckpoint: the file ends too early.
    """
    table = np.zeros(schema.block_count(tensor.size_bytes), TABLE_DTYPE)
    if len(table) and read_at(handle, table.data.cast("B"), tensor.table_offset) < table.nbytes:
        msg = f"{path} is truncated in the checksums of {tensor.name}/{tensor.slot}"
        raise CorruptCheckpoint(msg)
    return table


def check_block(path: Path, tensor: TensorEntry, block: int, data: memoryview, expected: int) -> None:
    """Compare a block that was read with its checksum.

    Raises:
        CorruptCheckpoint: names file, tensor, flat range and offset.
    """
    if crc32c(data) != expected:
        raise damaged(path, tensor, block, "does not match its checksum")


def damaged(path: Path, tensor: TensorEntry, block: int, what: str) -> CorruptCheckpoint:
    """The error for a block of a tensor that cannot be trusted; `path` is the file its elements are in."""
    first = block * schema.BLOCK_BYTES // tensor.itemsize
    last = min(tensor.numel, (block + 1) * schema.BLOCK_BYTES // tensor.itemsize)
    place = tensor.offset + block * schema.BLOCK_BYTES
    msg = (
        f"{path} is damaged: {tensor.name}/{tensor.slot}[{first}:{last}] (flat elements, at byte {place}) {what}; "
        "load another tag"
    )
    return CorruptCheckpoint(msg)
