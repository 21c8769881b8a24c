"""Reading checkpoints: any flat range of any tensor, whatever layout wrote it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.base.registry import did_you_mean
from mpispeed.ckpt import bits, model_file, payload, schema, state_file, tags
from mpispeed.ckpt import manifest as manifests
from mpispeed.ckpt.errors import CorruptCheckpoint
from mpispeed.ckpt.logical import ParamInfo
from mpispeed.ckpt.manifest import Manifest
from mpispeed.ckpt.model_file import Index, StoredTensor
from mpispeed.native.checksum import crc32c

log = logging.getLogger(__name__)


def open_checkpoint(folder: str | Path, tag: str | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading.

    Manifest, file sizes and the index of model.h5 are checked here; elements when they are read.

    Args:
        folder: folder of checkpoints, or with `tag` None also the folder of one tag.
        tag: which one; None for the one that `latest` names.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        IncompleteCheckpoint: the tag was never committed.
        CorruptCheckpoint: a file is missing, of another size, or its index was altered.
        CheckpointError: the format is newer.
    """
    path, name = tags.resolve(Path(folder), tag)
    manifest = manifests.read(path)
    warning = schema.check_version(manifest.version, str(path))
    if warning:
        log.warning("%s", warning)
    manifests.check_sizes(path, manifest)
    return Checkpoint(path, name, manifest)


class Checkpoint:
    """An open checkpoint. Use as a context manager, or call `close`.

    Reads are plain reads at known offsets; one object serves one thread at a time.

    Attributes:
        path: folder of the tag.
        tag: its name.
        manifest: what manifest.json says.
    """

    def __init__(self, path: Path, tag: str, manifest: Manifest) -> None:
        self.path, self.tag, self.manifest = path, tag, manifest
        self._model = path / schema.MODEL_FILE
        try:
            self._handle = os.open(self._model, os.O_RDONLY)
        except OSError as failure:
            msg = f"{self._model} cannot be read: {failure.strerror}"
            raise CheckpointError(msg) from failure
        try:
            self._check_index()
            self._index: Index = model_file.read_index(self._model)
        except BaseException:
            self.close()
            raise
        self._slots: dict[str, list[str]] = {}
        for name, slot in self._index.tensors:
            self._slots.setdefault(name, []).append(slot)
        self._tables: dict[tuple[str, str], np.ndarray] = {}
        self._edge: tuple[tuple[str, str, int], memoryview] | None = None
        self._state: state_file.Content | None = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; reading is over. May be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

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
        return list(self._index.params)

    def buffers(self) -> list[str]:
        """Buffers, sorted by name; each has the slot "buffer"."""
        return [name for name, slot in self._index.tensors if slot == schema.BUFFER_SLOT]

    def aliases(self) -> dict[str, str]:
        """Alias -> canonical name of tied parameters."""
        return dict(self._index.aliases)

    def info(self, name: str) -> ParamInfo:
        """Attributes of a parameter.

        Raises:
            CheckpointError: there is none of that name.
        """
        try:
            return self._index.params[name]
        except KeyError:
            msg = f"{self.path} has no parameter {name!r}.{did_you_mean(name, self._index.params)}"
            raise CheckpointError(msg) from None

    def slots(self, name: str) -> list[str]:
        """Slots that are stored of a parameter, the master first; none for an unknown name."""
        return [slot for slot in self._slots.get(name, []) if slot != schema.BUFFER_SLOT]

    def stored(self, name: str, slot: str) -> StoredTensor:
        """Shape, dtype and place of one tensor.

        Raises:
            CheckpointError: it is not stored.
        """
        try:
            return self._index.tensors[name, slot]
        except KeyError:
            have = ", ".join(self._slots.get(name, [])) or "nothing of that name"
            msg = f"{self.path} has no {slot!r} of {name!r}; it has {have}.{did_you_mean(name, self._slots)}"
            raise CheckpointError(msg) from None

    def state(self) -> dict[str, Any]:
        """The state tree as it was passed to `save`; a copy that the caller may change.

        state.h5 is read once, by the first call that asks for anything in it.

        Raises:
            CorruptCheckpoint: state.h5 was altered.
        """
        return copy.deepcopy(self._content().state)

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
        dtype = bits.torch_dtype(tensor.dtype)
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._read_bytes(tensor, start * tensor.itemsize, bits.as_bytes(out), verify)
            return
        step = schema.BLOCK_BYTES // tensor.itemsize
        scratch = torch.empty(min(step, out.numel()), dtype=dtype)
        for first in range(0, out.numel(), step):
            part = scratch[: min(step, out.numel() - first)]
            self._read_bytes(tensor, (start + first) * tensor.itemsize, bits.as_bytes(part), verify)
            out[first : first + part.numel()].copy_(part)

    def read_whole(self, name: str, slot: str, verify: bool = True) -> torch.Tensor:
        """A whole stored tensor in its own shape and dtype.

        Raises:
            CheckpointError: no such tensor.
            CorruptCheckpoint: the bytes are not those that were saved.
        """
        tensor = self.stored(name, slot)
        out = torch.empty(tensor.numel, dtype=bits.torch_dtype(tensor.dtype))
        self.read(name, slot, 0, out, verify)
        return out.reshape(tensor.shape)

    def _read_bytes(self, tensor: StoredTensor, start: int, data: memoryview, verify: bool) -> None:
        for block, first, part in _cut_by_block(start, data):
            size = min(schema.BLOCK_BYTES, tensor.size_bytes - block * schema.BLOCK_BYTES)
            if not verify or len(part) == size:
                self._read_direct(tensor, block, first, part)
                if verify:
                    self._verify(tensor, block, part)
            else:
                part[:] = self._edge_block(tensor, block, size)[first : first + len(part)]

    def _read_direct(self, tensor: StoredTensor, block: int, first: int, data: memoryview) -> None:
        if self._handle < 0:
            msg = f"the checkpoint {self.path} is closed"
            raise CheckpointError(msg)
        place = tensor.offset + block * schema.BLOCK_BYTES + first
        if payload.read_at(self._handle, data, place) < len(data):
            raise payload.damaged(self._model, tensor, block, "is cut off")

    def _edge_block(self, tensor: StoredTensor, block: int, size: int) -> memoryview:
        """A verified block of which only a part is wanted; kept, because the next range often wants more of it."""
        key = (tensor.name, tensor.slot, block)
        if self._edge is None or self._edge[0] != key:
            data = memoryview(bytearray(size))
            self._read_direct(tensor, block, 0, data)
            self._verify(tensor, block, data)
            self._edge = (key, data)
        return self._edge[1]

    def _verify(self, tensor: StoredTensor, block: int, data: memoryview) -> None:
        key = (tensor.name, tensor.slot)
        if key not in self._tables:
            self._tables[key] = payload.read_table(self._handle, self._model, tensor)
        payload.check_block(self._model, tensor, block, data, int(self._tables[key][block]))

    def _check_index(self) -> None:
        record = self.manifest.files.get(schema.MODEL_FILE)
        if record is None:
            msg = f"the manifest of {self.path} does not list {schema.MODEL_FILE}"
            raise CorruptCheckpoint(msg)
        crc = 0
        with model_file.translated(self._model):
            for start, length in record.index_extents:
                crc = payload.checksum_of(self._handle, start, length, crc)
        if crc != record.index_crc32c:
            msg = f"{self._model} is damaged: its index (names, attributes, offsets, checksums) was altered"
            raise CorruptCheckpoint(msg)

    def _content(self) -> state_file.Content:
        if self._state is None:
            path = self.path / schema.STATE_FILE
            try:
                raw = path.read_bytes()
            except OSError as failure:
                msg = f"{path} cannot be read: {failure.strerror}"
                raise CheckpointError(msg) from failure
            record = self.manifest.files.get(schema.STATE_FILE)
            if record is None or crc32c(raw) != record.crc32c:
                msg = f"{path} is damaged: it does not match the checksum in {schema.MANIFEST_FILE}"
                raise CorruptCheckpoint(msg)
            self._state = state_file.decode(path, raw)
        return self._state


def _cut_by_block(start: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Cut a byte range at block boundaries: (block, first byte within it, part of `data`)."""
    done = 0
    while done < len(data):
        block, first = divmod(start + done, schema.BLOCK_BYTES)
        part = data[done : done + schema.BLOCK_BYTES - first]
        yield block, first, part
        done += len(part)
