"""Writing of elements at known offsets, and of their checksums.

Files are written with O_DIRECT and several blocks in flight where the file system supports it: ranks that write into
one file through the page cache wait for each other, because file systems lock a file for every buffered write; writes
with O_DIRECT into space that is reserved already do not (measured on ext4, two ranks: 1.6 to 5 times as fast). Bytes
outside of aligned blocks go through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from mpispeed.base.errors import CheckpointError, NativeMissing, StoreError
from mpispeed.ckpt.format import index, schema
from mpispeed.ckpt.format.index import TABLE_DTYPE, checksum_of, find_some
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, Piece
from mpispeed.ckpt.format.manifest import FileRecord
from mpispeed.ckpt.format.sparse_image import write_at
from mpispeed.ckpt.format.tag_files import Places
from mpispeed.native.block_file import BlockFile
from mpispeed.native.checksum import crc32c, crc32c_combine

if TYPE_CHECKING:
    import torch

    from mpispeed.native.block_io import BlockIO, Transfer


#: share of the blocks that a sampled read-back checks
_SAMPLE = 0.01


def write_pieces(
    folder: Path, tensors: Sequence[LogicalTensor], places: Places, spared: Collection[int] = ()
) -> np.ndarray:
    """Write this rank's pieces at their places and wait until they are on the disk.

    Args:
        folder: that the files are in.
        tensors: with this rank's pieces.
        places: of the tensors.
        spared: indices of tensors that are written elsewhere.

    Shapes:
        result: int64 [segments, 4], rows (tensor, block, bytes, share of the block's checksum), as `share`.

    Raises:
        CheckpointError: the file system refuses, or deferred elements cannot be read; names the tensor and the range.
    """
    rows: list[tuple[int, int, int, int]] = []
    with OpenFiles(folder, places.files) as files:
        for index, tensor in enumerate(tensors):
            for piece in () if index in spared else tensor.pieces:
                if piece.is_replica or not piece.count:
                    continue
                target = Target(files, int(places.which[index]), int(places.data[index]), tensor)
                rows.extend((index, *row) for row in _write_piece(target, piece))
        files.sync()
    return np.array(rows, np.int64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor and its place: the number of a file, and the offset of its first byte there."""

    files: OpenFiles
    file: int
    offset: int
    tensor: LogicalTensor


def _write_piece(target: Target, piece: Piece) -> Iterator[tuple[int, int, int]]:
    tensor, runs = target.tensor, piece.runs()
    position = left = 0
    with contextlib.closing(checked_parts(tensor, piece, 0, piece.count)) as parts:
        for data in parts:
            done = 0
            while done < len(data):
                if not left:
                    first, count = next(runs)
                    position, left = first * tensor.itemsize, count * tensor.itemsize
                part = data[done : done + left]
                yield from write_run(target, position, part)
                position, left, done = position + len(part), left - len(part), done + len(part)
            if isinstance(piece.values, Deferred):
                target.files.settle()  # the memory of this part is used for the next


def write_run(target: Target, position: int, data: memoryview) -> Iterator[tuple[int, int, int]]:
    """Write bytes of one tensor, block by block; they must not change before `OpenFiles.settle`.

    Args:
        target: the tensor.
        position: first byte, counted from the first element of the tensor.
        data: the bytes.

    Yields:
        As `share`.

    Raises:
        CheckpointError: the file system refuses; names the tensor and the range of elements.
    """
    tensor, done = target.tensor, 0
    while done < len(data):
        chunk = data[done : done + schema.BLOCK_BYTES - position % schema.BLOCK_BYTES]
        first, last = position // tensor.itemsize, (position + len(chunk)) // tensor.itemsize
        # The checksum is computed while the disk writes this block and those before it.
        target.files.write(target.file, chunk, target.offset + position, f"{tensor.label}[{first}:{last}]")
        yield share(tensor, position, chunk)
        position, done = position + len(chunk), done + len(chunk)


def share(tensor: LogicalTensor, position: int, data: memoryview) -> tuple[int, int, int]:
    """The share of bytes inside one block in the block's checksum, as (block, bytes, share).

    The checksum of a block is the exclusive or of the shares of its parts, in any order: a share is the checksum of the
    bytes followed by zeros up to the end of the block.
    """
    block = position // schema.BLOCK_BYTES
    behind = min((block + 1) * schema.BLOCK_BYTES, tensor.size_bytes) - position - len(data)
    crc = crc32c(data)
    return block, len(data), crc32c_combine(crc, 0, behind) if behind else crc


def checked_parts(tensor: LogicalTensor, piece: Piece, first: int, last: int) -> Generator[memoryview, None, None]:
    """The bytes of the values [first, last) of a piece, in order; checks that their number is right.

    Raises:
        CheckpointError: deferred elements are more or fewer than they should be.
    """
    missing = (last - first) * tensor.itemsize
    with contextlib.closing(piece.parts(first, last)) as parts:
        for part in _read(parts, tensor, first, last):
            data = schema.as_bytes(part)
            missing -= len(data)
            if missing < 0:
                break  # it would be written over the neighbour
            yield data
    if missing:
        msg = f"the elements of {tensor.label} that are read when they are written are not those of the piece at "
        msg += f"{piece.start}: they do not end at its element {last}"
        raise CheckpointError(msg)


def _read(
    parts: Iterator[torch.Tensor], tensor: LogicalTensor, first: int, last: int
) -> Generator[torch.Tensor, None, None]:
    try:
        yield from parts
    except (OSError, StoreError) as failure:
        msg = f"reading the elements of {tensor.label} to be written, values [{first}:{last}] of this rank's: {failure}"
        raise CheckpointError(msg) from failure


def block_tables(tensors: Sequence[LogicalTensor], segments_by_rank: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Combine the shares of all ranks into one checksum per block of every tensor.

    Shapes:
        result: per tensor uint32 [blocks]

    Raises:
        CheckpointError: the number of bytes written differs from a block's size.
    """
    rows = np.concatenate([np.empty((0, 4), np.int64), *segments_by_rank])
    blocks_of = [schema.block_count(tensor.size_bytes) for tensor in tensors]
    begins = np.concatenate([[0], np.cumsum(blocks_of)]).astype(np.int64)
    at = begins[rows[:, 0]] + rows[:, 1]
    written, crcs = np.zeros(begins[-1], np.int64), np.zeros(begins[-1], np.int64)
    np.add.at(written, at, rows[:, 2])
    np.bitwise_xor.at(crcs, at, rows[:, 3])
    tables = []
    for tensor, begin, end in zip(tensors, begins[:-1], begins[1:], strict=True):
        expected = np.full(end - begin, schema.BLOCK_BYTES, np.int64)
        expected[-1:] = tensor.size_bytes - schema.BLOCK_BYTES * (end - begin - 1)
        wrong = np.flatnonzero(written[begin:end] != expected)
        if len(wrong):
            block = int(wrong[0])
            msg = f"tensor {tensor.label}: {written[begin + block]} bytes of block {block} were written, "
            msg += f"it has {expected[block]}"
            raise CheckpointError(msg)
        tables.append(crcs[begin:end].astype(TABLE_DTYPE))
    return tables


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


def read_back(
    folder: Path, data_files: Sequence[str], tensors: Sequence[LogicalTensor], *, is_full: bool, seed: str
) -> None:
    """Find tensors in finished files, read blocks of them and compare them with their checksums.

    Args:
        folder: that the files are in.
        data_files: files with elements besides model.h5.
        tensors: what the files hold.
        is_full: True for all blocks, False for a sample of 1 % and at least one.
        seed: chooses the sample.

    Raises:
        CorruptCheckpoint: names the first block that differs.
    """
    chosen = [(i, block) for i, tensor in enumerate(tensors) for block in range(schema.block_count(tensor.size_bytes))]
    if not is_full and chosen:
        sample = random.Random(seed).sample(range(len(chosen)), max(1, round(len(chosen) * _SAMPLE)))
        chosen = [chosen[i] for i in sorted(sample)]
    wanted = sorted({(tensors[i].name, tensors[i].slot) for i, _ in chosen})
    stored = {(tensor.name, tensor.slot): tensor for tensor in find_some(folder, data_files, wanted)}
    buffer, tables = memoryview(bytearray(schema.BLOCK_BYTES)), {}
    with contextlib.ExitStack() as stack:
        handles: dict[str, int] = {}
        for name in {schema.MODEL_FILE, *(tensor.file for tensor in stored.values())}:
            handles[name] = index.open_plain(folder / name)
            stack.callback(os.close, handles[name])
        for i, block in chosen:
            tensor = stored[tensors[i].name, tensors[i].slot]
            data, path = buffer[: index.block_bytes(tensor, block)], folder / tensor.file
            if index.read_at(handles[tensor.file], data, tensor.offset + block * schema.BLOCK_BYTES) < len(data):
                raise index.damaged(path, tensor, block, "is cut off")
            if i not in tables:
                tables[i] = index.read_table(handles[schema.MODEL_FILE], folder / schema.MODEL_FILE, tensor)
            index.check_block(path, tensor, block, data, int(tables[i][block]))


#: blocks under way at a time, and requests that the system has of them
_DEPTH = 8
#: smaller ones are not worth a queue
_LEAST_BYTES = 256 << 10


class OpenFiles:
    """The files with elements, opened at their first write. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str], *, is_direct: bool = True) -> None:
        """Args: `is_direct`: with O_DIRECT where the file system has it."""
        self._folder, self._names = folder, names
        self._files: dict[int, BlockFile] = {}
        self._under_way: deque[tuple[Transfer, str]] = deque()
        self._io = _make_io(folder) if is_direct and names else None

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()  # waits for what is under way
        self._files.clear()
        self._under_way.clear()
        if self._io is not None:
            self._io.close()

    def path(self, file: int) -> Path:
        """Path of a file, by its number."""
        return self._folder / self._names[file]

    def write(self, file: int, data: memoryview, offset: int, label: str) -> None:
        """Write bytes at an offset of a file; their memory must not change before `settle`.

        Args:
            file: its number.
            data: writable memory, which is only read.
            offset: in the file.
            label: name of the bytes, for messages.

        Raises:
            CheckpointError: this write or one before it failed.
        """
        while len(self._under_way) >= _DEPTH:
            self._end_first()
        try:
            target = self._open(file)
            if self._io is None or len(data) < _LEAST_BYTES:
                write_at(target.descriptors(has_odd_bytes=True)[1], data, offset)
            else:
                bytes_of = torch.frombuffer(data, dtype=torch.uint8)
                self._under_way.append((self._io.write(target, bytes_of, offset), label))
        except OSError as failure:
            msg = f"writing {label} to {self.path(file)}: {failure}"
            raise CheckpointError(msg) from failure

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            CheckpointError: one of them failed.
        """
        while self._under_way:
            self._end_first()

    def sync(self) -> None:
        """Wait until all writes are on the disk.

        Raises:
            CheckpointError: a write failed, or the file system refuses.
        """
        self.settle()
        for number, file in self._files.items():
            try:
                os.fsync(file.descriptors(has_odd_bytes=True)[1])
            except OSError as failure:
                msg = f"bringing {self.path(number)} to the disk: {failure}"
                raise CheckpointError(msg) from failure

    def _end_first(self) -> None:
        transfer, label = self._under_way.popleft()
        try:
            transfer.wait()
        except OSError as failure:
            msg = f"writing {label}: {failure}"
            raise CheckpointError(msg) from failure

    def _open(self, file: int) -> BlockFile:
        if file not in self._files:
            try:
                self._files[file] = BlockFile(self.path(file), direct=self._io is not None)
            except OSError as failure:
                if self._io is None or failure.errno != errno.EINVAL:
                    raise
                self._files[file] = BlockFile(self.path(file), direct=False)  # the folder has O_DIRECT, this file not
        return self._files[file]


def _make_io(folder: Path) -> BlockIO | None:
    """An I/O queue if O_DIRECT works beside `folder`, else None; cached by the folder of checkpoints."""
    from mpispeed.native.block_file import probe
    from mpispeed.native.block_io import BlockIO, Options

    try:
        return BlockIO(Options(queue_depth=_DEPTH)) if probe(folder.parent).is_direct else None
    except (NativeMissing, OSError):  # plain writes do the same
        return None
