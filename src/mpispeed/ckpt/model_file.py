"""model.h5: laid out by one rank before any element is written; described again when it is read."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5g

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import hdf5, schema
from mpispeed.ckpt.errors import CorruptCheckpoint
from mpispeed.ckpt.logical import LogicalTensor, ParamInfo


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where the bytes of each tensor and of its checksums start, in the order in which tensors were passed.

    Shapes:
        data, tables: int64 [tensors]; -1 for tensors without elements

    Units:
        bytes from the start of model.h5
    """

    data: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A dataset of an existing model.h5.

    Units:
        offset, table_offset: bytes from the start of the file, -1 when there are no elements.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    table_offset: int

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


def create(
    path: Path,
    *,
    tag: str,
    global_step: int,
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str],
) -> Offsets:
    """Create model.h5 with all its objects; the elements and the checksums are left to be written at offsets.

    The order in the file is canonical (sorted by name, the master first within a parameter), so the
    bytes do not depend on the order or the layout of the caller.

    Raises:
        OSError: the file system refuses.
    """
    data = np.full(len(tensors), -1, np.int64)
    tables = np.full(len(tensors), -1, np.int64)
    slots = _slots_by_name(tensors)
    with hdf5.Builder(path) as build:
        _root_attributes(build, tag, global_step)
        homes = {name: build.group(build.root, name) for name in (schema.PARAMS, schema.BUFFERS)}
        alias_group = build.group(build.root, schema.ALIASES)
        sums = build.group(build.root, schema.INTEGRITY)
        for param in sorted(params, key=lambda p: p.name):
            group = build.group(homes[schema.PARAMS], schema.escape(param.name))
            _param_attributes(build, group, param)
            for i in slots.get(param.name, []):
                tensor = tensors[i]
                if tensor.slot != schema.BUFFER_SLOT:
                    data[i] = build.dataset(group, schema.escape(tensor.slot), tensor.shape, tensor.dtype_name)
        for name in sorted(slots):
            group = build.group(sums, schema.escape(name))
            for i in slots[name]:
                tensor = tensors[i]
                if tensor.slot == schema.BUFFER_SLOT:
                    home = homes[schema.BUFFERS]
                    data[i] = build.dataset(home, schema.escape(name), tensor.shape, tensor.dtype_name)
                blocks = (schema.block_count(tensor.size_bytes),)
                tables[i] = build.dataset(group, schema.escape(tensor.slot), blocks, "uint32")
        for alias in sorted(aliases):
            build.attribute(alias_group, schema.escape(alias), aliases[alias])
    return Offsets(data, tables)


def _slots_by_name(tensors: Sequence[LogicalTensor]) -> dict[str, list[int]]:
    slots: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        slots.setdefault(tensor.name, []).append(index)
    for indices in slots.values():
        indices.sort(key=lambda i: schema.slot_order(tensors[i].slot))
    return slots


def _root_attributes(build: hdf5.Builder, tag: str, global_step: int) -> None:
    build.attribute(build.root, "format", schema.FORMAT)
    build.attribute(build.root, "version", schema.VERSION)
    build.attribute(build.root, "framework_version", schema.library_version())
    build.attribute(build.root, "tag", tag)
    build.attribute(build.root, "global_step", global_step)
    build.attribute(build.root, "endian", "little")


def _param_attributes(build: hdf5.Builder, group: h5g.GroupID, param: ParamInfo) -> None:
    values: dict[str, str | float | tuple[int, ...]] = {
        "shape": param.shape,
        "numel": param.numel,
        "train_dtype": str(param.train_dtype),
        "kind": param.kind,
        "param_group": param.param_group,
        "step": param.step,
        "tp_kind": param.tp_kind,
        "tp_dim": param.tp_dim,
        "tp_sub_sizes": tuple(param.tp_sub_sizes),
        "vocab_size": param.vocab_size,
        "pp_kind": param.pp_kind,
        "pp_layer": param.pp_layer,
        "expert": -1 if param.expert is None else tuple(param.expert),
        "sparse": param.is_sparse,
    }
    if param.scalars:
        # one JSON attribute keeps integers, floats and bools apart and any name legal
        values["scalars"] = json.dumps(dict(sorted(param.scalars.items())))
    for name, value in values.items():
        build.attribute(group, name, value)


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


def read_index(path: Path) -> Index:
    """Read names, attributes and offsets of an existing model.h5; no element is read.

    Raises:
        CorruptCheckpoint: HDF5 cannot make sense of the file.
        CheckpointError: the file is not of this format, or of a newer major version.
    """
    with translated(path), hdf5.open_reading(path) as file:
        attributes = dict(file.attrs)
        if hdf5.text(attributes.get("format", b"")) != schema.FORMAT:
            msg = f"{path} is an HDF5 file, but no {schema.FORMAT}"
            raise CheckpointError(msg)
        major, minor = (int(part) for part in attributes["version"])
        schema.check_version((major, minor), str(path))
        params: dict[str, ParamInfo] = {}
        tensors: dict[tuple[str, str], StoredTensor] = {}
        sums = hdf5.child_group(file.id, schema.INTEGRITY)
        home = hdf5.child_group(file.id, schema.PARAMS)
        for stored in hdf5.names(home):
            group = hdf5.child_group(home, stored)
            param = _read_param(schema.unescape(stored), h5py.Group(group))
            params[param.name] = param
            slots = [(schema.unescape(slot), hdf5.child_dataset(group, slot)) for slot in hdf5.names(group)]
            tensors.update(_read_tensors(param.name, slots, sums))
        home = hdf5.child_group(file.id, schema.BUFFERS)
        for stored in hdf5.names(home):
            slots = [(schema.BUFFER_SLOT, hdf5.child_dataset(home, stored))]
            tensors.update(_read_tensors(schema.unescape(stored), slots, sums))
        named = h5py.Group(hdf5.child_group(file.id, schema.ALIASES)).attrs
        aliases = {schema.unescape(k): hdf5.text(v) for k, v in named.items()}
        tag, step = hdf5.text(attributes["tag"]), int(attributes["global_step"])
        return Index((major, minor), tag, step, params, tensors, aliases)


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


def _read_tensors(
    name: str, slots: Sequence[tuple[str, h5d.DatasetID]], sums: h5g.GroupID
) -> Iterator[tuple[tuple[str, str], StoredTensor]]:
    if not slots:
        return
    tables = hdf5.child_group(sums, schema.escape(name))
    for slot, dataset in slots:
        table = hdf5.child_dataset(tables, schema.escape(slot))
        offset, table_offset = dataset.get_offset(), table.get_offset()
        stored = StoredTensor(
            name=name,
            slot=slot,
            shape=tuple(dataset.shape),
            dtype=_stored_dtype(dataset),
            offset=-1 if offset is None else int(offset),
            table_offset=-1 if table_offset is None else int(table_offset),
        )
        table_bytes = schema.block_count(stored.size_bytes) * schema.STORAGE["uint32"].itemsize
        if stored.numel and (stored.offset < 0 or stored.table_offset < 0 or table.shape[0] * 4 != table_bytes):
            msg = f"{name}/{slot} or its checksums have no place in the file"
            raise ValueError(msg)
        yield (name, slot), stored


def _stored_dtype(dataset: h5d.DatasetID) -> str:
    if h5py.h5a.exists(dataset, b"dtype"):
        return schema.dtype_name(hdf5.text(h5py.AttributeManager(h5py.Dataset(dataset))["dtype"]))
    return schema.native_name(dataset.dtype)
