"""What the files of a checkpoint say about their content: names, attributes, offsets. Reads no element; no torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import hdf5, schema
from mpispeed.ckpt.errors import CorruptCheckpoint
from mpispeed.ckpt.logical import ParamInfo


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A dataset of an existing checkpoint.

    Attributes:
        file: the file that has the elements, relative to the folder of the tag; checksums are in model.h5.

    Units:
        offset, table_offset: bytes from the start of their file, -1 when there are no elements.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    table_offset: int
    file: str = schema.MODEL_FILE

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return schema.STORAGE[self.dtype].itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Index:
    """What model.h5 says about its content."""

    version: tuple[int, int]
    tag: str
    global_step: int
    params: dict[str, ParamInfo]
    tensors: dict[tuple[str, str], StoredTensor]
    aliases: dict[str, str]


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn whatever h5py and its values raise on a damaged file into an error that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:
        msg = f"{path} is damaged or no checkpoint file: {failure}"
        raise CorruptCheckpoint(msg) from failure


def read_index(folder: Path, data_files: Collection[str] = ()) -> Index:
    """Read names, attributes and offsets from model.h5 and the data files; no element is read.

    Args:
        folder: of the tag.
        data_files: names that links may lead to: the data files that the manifest lists.

    Raises:
        CorruptCheckpoint: HDF5 cannot make sense of a file.
        CheckpointError: a file is not of this format, or of a newer major version.
    """
    path = folder / schema.MODEL_FILE
    with contextlib.ExitStack() as stack:
        stack.enter_context(translated(path))
        file = stack.enter_context(hdf5.open_reading(path))
        attributes = _root(file, schema.FORMAT, path)
        others = {name: _open_data(stack, folder / name, attributes["tag"]) for name in data_files}
        reader = _TensorReader(hdf5.child_group(file.id, schema.INTEGRITY), path.stat().st_size, others)
        params: dict[str, ParamInfo] = {}
        home = hdf5.child_group(file.id, schema.PARAMS)
        for stored in hdf5.names(home):
            group = hdf5.child_group(home, stored)
            param = _read_param(schema.unescape(stored), h5py.Group(group))
            params[param.name] = param
            for slot in hdf5.names(group):
                reader.read(param.name, schema.unescape(slot), group, slot)
        home = hdf5.child_group(file.id, schema.BUFFERS)
        for stored in hdf5.names(home):
            reader.read(schema.unescape(stored), schema.BUFFER_SLOT, home, stored)
        named = h5py.Group(hdf5.child_group(file.id, schema.ALIASES)).attrs
        aliases = {schema.unescape(k): hdf5.text(v) for k, v in named.items()}
        major, minor = (int(part) for part in attributes["version"])
        tag, step = hdf5.text(attributes["tag"]), int(attributes["global_step"])
        return Index((major, minor), tag, step, params, reader.found, aliases)


def _root(file: h5py.File, form: str, path: Path) -> dict[str, Any]:
    attributes = dict(file.attrs)
    if hdf5.text(attributes.get("format", b"")) != form:
        msg = f"{path} is an HDF5 file, but no {form}"
        raise CheckpointError(msg)
    major, minor = (int(part) for part in attributes["version"])
    schema.check_version((major, minor), str(path))
    return attributes


def _open_data(stack: contextlib.ExitStack, path: Path, tag: object) -> tuple[h5py.File, int]:
    with translated(path):
        file = stack.enter_context(hdf5.open_reading(path))
        found = hdf5.text(_root(file, schema.DATA_FORMAT, path)["tag"])
        if found != hdf5.text(tag):
            msg = f"it belongs to the tag {found!r}"
            raise ValueError(msg)
    return file, path.stat().st_size


def _read_param(name: str, group: h5py.Group) -> ParamInfo:
    values = dict(group.attrs)
    expert = np.atleast_1d(values["expert"]).tolist()
    return ParamInfo(
        name=name,
        shape=tuple(values["shape"].tolist()),
        train_dtype=hdf5.text(values["train_dtype"]),
        kind=hdf5.text(values["kind"]),
        param_group=int(values["param_group"]),
        step=int(values["step"]),
        tp_kind=hdf5.text(values["tp_kind"]),
        tp_dim=int(values["tp_dim"]),
        tp_sub_sizes=tuple(values["tp_sub_sizes"].tolist()),
        vocab_size=int(values["vocab_size"]),
        pp_kind=hdf5.text(values["pp_kind"]),
        pp_layer=int(values["pp_layer"]),
        expert=None if len(expert) == 1 else (expert[0], expert[1]),
        is_sparse=bool(values["sparse"]),
        scalars=json.loads(hdf5.text(values["scalars"])) if "scalars" in values else {},
    )


class _TensorReader:
    """Finds places of tensors; follows links only to listed data files, and there only to a tensor's own place."""

    def __init__(self, sums: h5g.GroupID, model_bytes: int, others: Mapping[str, tuple[h5py.File, int]]) -> None:
        self._sums, self._model_bytes, self._others = sums, model_bytes, others
        self.found: dict[tuple[str, str], StoredTensor] = {}

    def read(self, name: str, slot: str, home: h5g.GroupID, link: str) -> None:
        """Add the tensor that `link` of the group `home` is, or leads to."""
        target = hdf5.external_target(home, link)
        file, size = schema.MODEL_FILE, self._model_bytes
        if target is None:
            dataset = hdf5.child_dataset(home, link)
        else:
            file, path = target
            if file not in self._others or path != schema.dataset_path(name, slot):
                msg = f"{schema.dataset_path(name, slot)} is a link to {path} in {file!r}, which is no place for it"
                raise ValueError(msg)
            other, size = self._others[file]
            *groups, last = path[1:].split("/")
            parent: h5g.GroupID = other.id
            for part in groups:
                parent = hdf5.child_group(parent, part)
            dataset = hdf5.child_dataset(parent, last)
        table = hdf5.child_dataset(hdf5.child_group(self._sums, schema.escape(name)), schema.escape(slot))
        offset, table_offset = dataset.get_offset(), table.get_offset()
        stored = StoredTensor(
            name=name,
            slot=slot,
            shape=tuple(dataset.shape),
            dtype=_stored_dtype(dataset),
            offset=-1 if offset is None else int(offset),
            table_offset=-1 if table_offset is None else int(table_offset),
            file=file,
        )
        self._check_place(stored, table, size)
        self.found[name, slot] = stored

    def _check_place(self, stored: StoredTensor, table: h5d.DatasetID, file_bytes: int) -> None:
        if not stored.numel:
            return
        table_bytes = schema.block_count(stored.size_bytes) * schema.STORAGE["uint32"].itemsize
        has_table = table.shape == (table_bytes // 4,) and table.dtype == schema.STORAGE["uint32"]
        ends_inside = stored.offset >= 0 and stored.offset + stored.size_bytes <= file_bytes
        table_inside = stored.table_offset >= 0 and stored.table_offset + table_bytes <= self._model_bytes
        if not (has_table and ends_inside and table_inside):
            msg = f"{stored.name}/{stored.slot} or its checksums have no place in the file"
            raise ValueError(msg)


def _stored_dtype(dataset: h5d.DatasetID) -> str:
    if h5py.h5a.exists(dataset, b"dtype"):
        return schema.dtype_name(hdf5.text(h5py.AttributeManager(h5py.Dataset(dataset))["dtype"]))
    return schema.native_name(dataset.dtype)
