"""Readers of a checkpoint's names, attributes, state and bytes, which need no torch, and of its tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.registry import did_you_mean
from mpispeed.ckpt.format import index, schema, tag_files, tags, tree
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.index import Index, TensorEntry
from mpispeed.ckpt.format.logical import ParamInfo
from mpispeed.ckpt.format.manifest import Manifest
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: at a tag that is overwritten again and again while it is opened
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Opened:
    """A found checkpoint whose manifest, sizes and index have been checked; may be sent to other ranks.

    Attributes:
        path: folder of the tag.
        tag: its name.
        manifest: what manifest.json says.
        index: what model.h5 says.
    """

    path: Path
    tag: str
    manifest: Manifest
    index: Index


def find(folder: str | Path, tag: str | None = None) -> Opened:
    """Find a committed checkpoint and check everything but its elements and its state.

    A tag that is overwritten meanwhile is checked again.

    Args:
        folder: folder of checkpoints, or with `tag` None also the folder of one tag.
        tag: which one; None for the one that `latest` names.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        IncompleteCheckpoint: the tag was never committed.
        CorruptCheckpoint: a file is missing, of another size or another checkpoint, or its index was altered.
        CheckpointError: the format is another one.
    """
    looks = 0
    while True:
        path, name = tags.resolve(Path(folder), tag)
        seen, looks = _identity(path), looks + 1
        try:
            return _find(path, name)
        except CheckpointError:
            # what is replaced by two names may have lost its files before the first look at its identity
            is_the_same = seen == _identity(path) and tags.resolve(Path(folder), tag)[0] == path
            if looks == _LOOKS or is_the_same:
                raise


def _identity(path: Path) -> tuple[int, int] | None:
    """Identity of a folder, which differs from that of a replacement."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _find(path: Path, name: str) -> Opened:
    manifest = manifests.read(path)
    warning = schema.check_version(manifest.version, str(path))
    if warning:
        log.warning("%s", warning)
    manifests.check_sizes(path, manifest)
    if schema.MODEL_FILE not in manifest.files:
        msg = f"the manifest of {path} does not list {schema.MODEL_FILE}"
        raise CorruptCheckpoint(msg)
    check_indexes(path, manifest)
    found = index.read_index(path, manifest.data_files)
    manifests.check_belongs(path / schema.MODEL_FILE, manifest, found.tag, found.global_step)
    return Opened(path, name, manifest, found)


def open_reader(folder: str | Path, tag: str | None = None) -> Reader:
    """Open a committed checkpoint for reading bytes; arguments and errors as `find`."""
    return Reader(find(folder, tag))


def check_indexes(path: Path, manifest: Manifest) -> None:
    """Check that the indexes of the files in a folder are those that were saved.

    Raises:
        CorruptCheckpoint: one was altered.
        CheckpointError: it cannot be read.
    """
    for file in (schema.MODEL_FILE, *manifest.data_files):
        _check_index(path / file, manifest.files[file])


def _check_index(path: Path, record: manifests.FileRecord) -> None:
    crc, handle = 0, index.open_plain(path)
    try:
        with index.translated(path):
            for start, length in record.index_extents:
                crc = index.checksum_of(handle, start, length, crc)
    finally:
        os.close(handle)
    if crc != record.index_crc32c:
        msg = f"{path} is damaged: its index (names, attributes, offsets, checksums) was altered"
        raise CorruptCheckpoint(msg)


class Reader:
    """An open checkpoint. Use as a context manager, or call `close`.

    Reads are plain reads at known offsets; one object serves one thread at a time.

    Attributes:
        path: folder of the tag.
        tag: its name.
        manifest: what manifest.json says.
        index: what model.h5 says.
    """

    def __init__(self, opened: Opened) -> None:
        self.path, self.tag, self.manifest, self.index = opened.path, opened.tag, opened.manifest, opened.index
        self._handles: dict[str, int] = {}
        self._is_closed = False
        self._slots: dict[str, list[str]] = {}
        for name, slot in self.index.tensors:
            self._slots.setdefault(name, []).append(slot)
        self._tables: dict[tuple[str, str], np.ndarray] = {}
        self._edge: tuple[tuple[str, str, int], memoryview] | None = None
        self._raw_state: bytes | None = None
        self._state: tag_files.StateContent | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._is_closed = True
        while self._handles:
            os.close(self._handles.popitem()[1])

    @property
    def global_step(self) -> int:
        """Step at which it was saved."""
        return self.manifest.global_step

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of the ranks that saved, as they described it."""
        return dict(self.manifest.layout)

    def names(self) -> list[str]:
        """Parameters, sorted by name."""
        return list(self.index.params)

    def buffers(self) -> list[str]:
        """Buffers, sorted by name; each has the slot "buffer"."""
        return [name for name, slot in self.index.tensors if slot == schema.BUFFER_SLOT]

    def aliases(self) -> dict[str, str]:
        """Alias -> canonical name of tied parameters."""
        return dict(self.index.aliases)

    def info(self, name: str) -> ParamInfo:
        """Attributes of a parameter.

        Raises:
            CheckpointError: there is none of that name.
        """
        try:
            return self.index.params[name]
        except KeyError:
            msg = f"{self.path} has no parameter {name!r}.{did_you_mean(name, self.index.params)}"
            raise CheckpointError(msg) from None

    def slots(self, name: str) -> list[str]:
        """Slots that are stored of a parameter, the master first; none for an unknown name."""
        return [slot for slot in self._slots.get(name, []) if slot != schema.BUFFER_SLOT]

    def stored(self, name: str, slot: str) -> TensorEntry:
        """Shape, dtype and place of one tensor.

        Raises:
            CheckpointError: it is not stored.
        """
        try:
            return self.index.tensors[name, slot]
        except KeyError:
            have = ", ".join(self._slots.get(name, [])) or "nothing of that name"
            msg = f"{self.path} has no {slot!r} of {name!r}; it has {have}.{did_you_mean(name, self._slots)}"
            raise CheckpointError(msg) from None

    def state(self, make_tensor: tree.TensorMaker | None = None) -> dict[str, Any]:
        """The state tree as it was passed to `save`, new at every call.

        Args:
            make_tensor: (stored array, dtype name) -> value for a tensor; None makes torch tensors.

        Raises:
            CorruptCheckpoint: state.h5 was altered, or is of another checkpoint.
        """
        self._content()
        return tag_files.decode_state(self.path / schema.STATE_FILE, self._state_bytes(), make_tensor)

    def config(self) -> str:
        """The configuration text of the run that saved.

        Raises:
            CorruptCheckpoint: state.h5 was altered.
        """
        return self._content().config

    def rng(self, kind: str) -> list[bytes]:
        """State of one kind of generator for every rank that saved; an empty list when none was stored.

        Raises:
            CorruptCheckpoint: state.h5 was altered.
        """
        content = self._content()
        ranks = len(content.generators[kind][1]) if kind in content.generators else 0
        return [content.rng(kind, rank) for rank in range(ranks)]

    def rng_of(self, rank: int) -> dict[str, bytes]:
        """Generator kind -> state of one rank that saved, without those it had no state of.

        Raises:
            CheckpointError: no such rank saved its generators.
            CorruptCheckpoint: state.h5 was altered.
        """
        if not 0 <= rank < self.rng_ranks:
            msg = f"{self.path} has generators of {self.rng_ranks} ranks, none of rank {rank}"
            raise CheckpointError(msg)
        content = self._content()
        states = {kind: content.rng(kind, rank) for kind in content.generators}
        return {kind: raw for kind, raw in states.items() if raw}

    @property
    def rng_ranks(self) -> int:
        """Number of ranks whose generators are stored; 0 when none are.

        Raises:
            CorruptCheckpoint: state.h5 was altered, or its kinds of generators are of different numbers of ranks.
        """
        sizes = {len(lengths) for _, lengths in self._content().generators.values()}
        if len(sizes) > 1:
            msg = f"{self.path / schema.STATE_FILE} has generators of different numbers of ranks: {sorted(sizes)}"
            raise CorruptCheckpoint(msg)
        return max(sizes, default=0)

    def rng_kinds(self) -> list[str]:
        """Kinds of generators whose state is stored."""
        return list(self._content().generators)

    def tensors(self) -> Iterator[TensorEntry]:
        """All tensors as they are stored: parameters by name with the master first, then buffers."""
        yield from self.index.tensors.values()

    def file_of(self, tensor: TensorEntry) -> Path:
        """The file that has the elements of a tensor."""
        return self.path / tensor.file

    def table(self, tensor: TensorEntry) -> np.ndarray:
        """The stored checksums of a tensor.

        Shapes:
            result: uint32 [blocks]
        """
        key = (tensor.name, tensor.slot)
        if key not in self._tables:
            model = self.path / schema.MODEL_FILE
            self._tables[key] = index.read_table(self._handle(schema.MODEL_FILE), model, tensor)
        return self._tables[key]

    def read_bytes(self, tensor: TensorEntry, start: int, data: memoryview, verify: bool = True) -> None:
        """Fill `data` with the stored bytes of a tensor from byte `start` on.

        Args:
            tensor: one of `tensors` or from `stored`.
            start: first byte, counted from the first element of the tensor.
            data: receives the bytes.
            verify: compare the blocks that the range touches with their checksums.

        Raises:
            CheckpointError: the range leaves the tensor, or the reader is closed.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        if start < 0 or start + len(data) > tensor.size_bytes:
            msg = f"bytes {start} to {start + len(data)} leave {tensor.name}/{tensor.slot} of {tensor.size_bytes} bytes"
            raise CheckpointError(msg)
        for block, first, part in _cut_by_block(start, data):
            size = index.block_bytes(tensor, block)
            if not verify or len(part) == size:
                self._read_direct(tensor, block, first, part)
                if verify:
                    self._verify(tensor, block, part)
            else:
                part[:] = self._edge_block(tensor, block, size)[first : first + len(part)]

    def chunks(self, tensor: TensorEntry, verify: bool = True) -> Iterator[np.ndarray]:
        """The elements of a tensor in order, at most 4 MiB at a time; each part is valid until the next is requested.

        Shapes:
            each: one-dimensional, of the stored numpy dtype (bit patterns where numpy has no such number)

        Raises:
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        dtype = schema.STORAGE[tensor.dtype]
        buffer = np.empty(min(tensor.size_bytes, schema.BLOCK_BYTES) // dtype.itemsize, dtype)
        for start in range(0, tensor.numel, max(1, len(buffer))):
            part = buffer[: tensor.numel - start]
            self.read_bytes(tensor, start * dtype.itemsize, part.data.cast("B"), verify)
            yield part

    def read_array(self, name: str, slot: str, verify: bool = True) -> np.ndarray:
        """A whole stored tensor in its shape, as stored.

        Raises:
            CheckpointError: no such tensor.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        tensor = self.stored(name, slot)
        out = np.empty(tensor.numel, schema.STORAGE[tensor.dtype])
        if tensor.numel:
            self.read_bytes(tensor, 0, out.data.cast("B"), verify)
        return out.reshape(tensor.shape)

    def _handle(self, file: str) -> int:
        if self._is_closed:
            msg = f"the checkpoint {self.path} is closed"
            raise CheckpointError(msg)
        if file not in self._handles:
            self._handles[file] = index.open_plain(self.path / file)
            if file == schema.MODEL_FILE:
                self._check_uuid()
        return self._handles[file]

    def _check_uuid(self) -> None:
        """Check that the tag is still the one found, once model.h5 is open; its checksums cover all other files."""
        if manifests.read(self.path).uuid != self.manifest.uuid:
            os.close(self._handles.pop(schema.MODEL_FILE))
            msg = f"{self.path} was overwritten after it had been opened; open it again"
            raise CheckpointError(msg)

    def _read_direct(self, tensor: TensorEntry, block: int, first: int, data: memoryview) -> None:
        place = tensor.offset + block * schema.BLOCK_BYTES + first
        try:
            count = index.read_at(self._handle(tensor.file), data, place)
        except OSError as failure:
            raise index.damaged(self.file_of(tensor), tensor, block, f"cannot be read: {failure.strerror}") from None
        if count < len(data):
            raise index.damaged(self.file_of(tensor), tensor, block, "is cut off")

    def _edge_block(self, tensor: TensorEntry, block: int, size: int) -> memoryview:
        """A verified block that is read in part; cached, because the next range often needs more of it."""
        key = (tensor.name, tensor.slot, block)
        if self._edge is None or self._edge[0] != key:
            data = memoryview(bytearray(size))
            self._read_direct(tensor, block, 0, data)
            self._verify(tensor, block, data)
            self._edge = (key, data)
        return self._edge[1]

    def _verify(self, tensor: TensorEntry, block: int, data: memoryview) -> None:
        index.check_block(self.file_of(tensor), tensor, block, data, int(self.table(tensor)[block]))

    def _state_bytes(self) -> bytes:
        """All of state.h5, read and compared with its checksum once."""
        if self._raw_state is None:
            path = self.path / schema.STATE_FILE
            record = self.manifest.files.get(schema.STATE_FILE)
            if record is None:
                msg = f"the manifest of {self.path} does not list {schema.STATE_FILE}"
                raise CorruptCheckpoint(msg)
            if record.bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                msg = f"{path} of {record.bytes} bytes is larger than the memory that it has to be read into"
                raise CorruptCheckpoint(msg)
            with os.fdopen(index.open_plain(path), "rb") as file, index.translated(path):
                raw = file.read(record.bytes)
            if len(raw) < record.bytes or crc32c(raw) != record.crc32c:
                msg = f"{path} is damaged: it does not match the checksum in {schema.MANIFEST_FILE}"
                raise CorruptCheckpoint(msg)
            self._raw_state = raw
        return self._raw_state

    def _content(self) -> tag_files.StateContent:
        if self._state is None:
            path = self.path / schema.STATE_FILE
            content = tag_files.decode_content(path, self._state_bytes())
            manifests.check_belongs(path, self.manifest, content.tag, content.global_step)
            self._state = content
        return self._state


def _cut_by_block(start: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Cut a byte range at block boundaries: (block, first byte within it, part of `data`)."""
    done = 0
    while done < len(data):
        block, first = divmod(start + done, schema.BLOCK_BYTES)
        part = data[done : done + schema.BLOCK_BYTES - first]
        yield block, first, part
        done += len(part)


def open_checkpoint(folder: str | Path, tag: str | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading.

    Manifest, file sizes and the index of model.h5 are checked here; elements when they are read. Arguments and errors
    as `reader.find`.
    """
    return Checkpoint(find(folder, tag))


class Checkpoint(Reader):
    """A reader that returns torch tensors."""

    def __enter__(self) -> Checkpoint:
        return self

    def read(self, name: str, slot: str, start: int, out: torch.Tensor, verify: bool = True) -> None:
        """Fill `out` from the flat range of the stored tensor that begins at element `start`.

        Bits are copied when the dtypes are equal, otherwise values are converted as `Tensor.copy_` does.

        Args:
            name: parameter or buffer.
            slot: "master", an optimizer slot, "weight16" or "buffer".
            start: first element, in the row-major order of the whole tensor.
            out: receives the elements.
            verify: compare the blocks that the range touches with their checksums.

        Shapes:
            out: one-dimensional; contiguous CPU memory of the stored dtype is filled without a copy.

        Raises:
            CheckpointError: no such tensor, or the range leaves it.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        tensor = self.stored(name, slot)
        stop = start + out.numel()
        if out.dim() != 1 or start < 0 or stop > tensor.numel:
            msg = (
                f"cannot read {name}/{slot}[{start}:{stop}] into a tensor of shape {tuple(out.shape)}: "
                f"the stored shape is {tensor.shape} ({tensor.numel} elements) and `out` has to be flat"
            )
            raise CheckpointError(msg)
        if out.numel() == 0:
            return
        import torch

        dtype = schema.torch_dtype(tensor.dtype)
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self.read_bytes(tensor, start * tensor.itemsize, schema.as_bytes(out), verify)
            return
        step = schema.BLOCK_BYTES // tensor.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=dtype)
        for first in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - first)]
            self.read_bytes(tensor, (start + first) * tensor.itemsize, schema.as_bytes(part), verify)
            out[first : first + part.numel()].copy_(part)

    def read_whole(self, name: str, slot: str, verify: bool = True) -> torch.Tensor:
        """A whole stored tensor in its own shape and dtype.

        Raises:
            CheckpointError: no such tensor.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        import torch

        tensor = self.stored(name, slot)
        out = torch.empty(tensor.numel, dtype=schema.torch_dtype(tensor.dtype))
        self.read(name, slot, 0, out, verify)
        return out.reshape(tensor.shape)
