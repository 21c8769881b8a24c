"""Index of a checkpoint's content (names, attributes, offsets), and reads of blocks with their checksums. No torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable
from mpispeed.ckpt.format import hdf5, schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.logical import ParamInfo, expert_problem
from mpispeed.ckpt.format.manifest import FileRecord
from mpispeed.native.checksum import crc32c

#: longest part of an HDF5 error in a message
_SHOWN_SIGNS = 600
#: slots that stand for the parameter itself
_WHOLE_SLOTS = (schema.MASTER_SLOT, "weight16")
#: types of datasets
_STORED = frozenset(schema.STORAGE.values())
#: HDF5 knows no more
_MAX_DIMS = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
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
    """Content of model.h5: parameters, tensors, aliases."""

    version: tuple[int, int]
    tag: str
    global_step: int
    params: dict[str, ParamInfo]
    tensors: dict[tuple[str, str], TensorEntry]
    aliases: dict[str, str]


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Context that turns any error of h5py on a damaged file into one that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:
        # the text of a KeyError is its argument as Python would write it
        what = str(failure.args[0] if isinstance(failure, KeyError) and failure.args else failure)
        what = what or type(failure).__name__
        # names in a damaged file may be long and of any characters
        msg = f"{path} is damaged or no checkpoint file: {printable(what, _SHOWN_SIGNS)}"
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
    with contextlib.ExitStack() as stack:
        file, attributes, reader = _open(stack, folder, data_files)
        params: dict[str, ParamInfo] = {}
        home = hdf5.child_group(file.id, schema.PARAMS)
        for stored in hdf5.names(home):
            group = hdf5.child_group(home, stored)
            param = _read_param(_name(stored), group)
            params[param.name] = param
            for slot in hdf5.names(group):
                _check_slot(param, reader.read(param.name, _name(slot), group, slot))
        home = hdf5.child_group(file.id, schema.BUFFERS)
        for stored in hdf5.names(home):
            reader.read(_name(stored), schema.BUFFER_SLOT, home, stored)
        reader.check_apart()
        aliases = _read_aliases(file, params)
        tag, step = attributes.text("tag"), whole(attributes, "global_step")
        return Index(_version(attributes), tag, step, params, reader.found, aliases)


def find_some(folder: Path, data_files: Collection[str], wanted: Iterable[tuple[str, str]]) -> list[TensorEntry]:
    """Read the places of some tensors, by name and slot; arguments and errors as `read_index`."""
    with contextlib.ExitStack() as stack:
        file, _, reader = _open(stack, folder, data_files)
        params, buffers = (hdf5.child_group(file.id, name) for name in (schema.PARAMS, schema.BUFFERS))
        found = []
        for name, slot in wanted:
            if slot == schema.BUFFER_SLOT:
                found.append(reader.read(name, slot, buffers, schema.escape(name)))
            else:
                home = hdf5.child_group(params, schema.escape(name))
                found.append(reader.read(name, slot, home, schema.escape(slot)))
        return found


def _open(
    stack: contextlib.ExitStack, folder: Path, data_files: Collection[str]
) -> tuple[h5py.File, hdf5.Attributes, _TensorReader]:
    """Open model.h5; return it, its attributes, and a reader of tensors in it and the data files."""
    path = folder / schema.MODEL_FILE
    stack.enter_context(translated(path))
    file = stack.enter_context(hdf5.open_reading(path))
    attributes = read_root(file, schema.FORMAT, path)
    others = {name: _open_data(stack, folder / name, attributes.text("tag")) for name in data_files}
    return file, attributes, _TensorReader(hdf5.child_group(file.id, schema.INTEGRITY), path.stat().st_size, others)


def read_root(file: h5py.File, form: str, path: Path) -> hdf5.Attributes:
    """Root attributes of a file of a checkpoint.

    Raises:
        CheckpointError: it is not of the format `form`, or of another major version.
        ValueError: it has no version.
    """
    attributes = hdf5.attributes(file.id)
    if hdf5.text(attributes.get("format", b"")) != form:
        msg = f"{path} is an HDF5 file, but no {form}"
        raise CheckpointError(msg)
    schema.check_version(_version(attributes), str(path))
    return attributes


def _version(attributes: Mapping[str, Any]) -> tuple[int, int]:
    numbers = _row(attributes, "version")
    if len(numbers) != 2 or min(numbers) < 0:
        msg = f"{numbers} is no version"
        raise ValueError(msg)
    return numbers[0], numbers[1]


def _name(stored: str) -> str:
    """The unescaped name of `stored`; refuses a second spelling of a name."""
    name = schema.unescape(stored)
    if schema.escape(name) != stored:
        msg = f"{stored!r:.80} is no name as a checkpoint spells it"
        raise ValueError(msg)
    return name


def _open_data(stack: contextlib.ExitStack, path: Path, tag: str) -> tuple[h5py.File, int]:
    with translated(path):
        file = stack.enter_context(hdf5.open_reading(path))
        found = read_root(file, schema.DATA_FORMAT, path).text("tag")
        if found != tag:
            msg = f"it belongs to the tag {found!r}"
            raise ValueError(msg)
    return file, path.stat().st_size


def _read_param(name: str, group: h5g.GroupID) -> ParamInfo:
    values = hdf5.attributes(group)
    return ParamInfo(
        name=name,
        shape=shape_of(values),
        train_dtype=_known(values.text("train_dtype")),
        kind=values.text("kind"),
        param_group=whole(values, "param_group"),
        step=whole(values, "step"),
        tp_kind=values.text("tp_kind"),
        tp_dim=whole(values, "tp_dim"),
        tp_sub_sizes=_row(values, "tp_sub_sizes"),
        tp_grains=_row(values, "tp_grains"),
        vocab_size=whole(values, "vocab_size"),
        pp_kind=values.text("pp_kind"),
        pp_layer=whole(values, "pp_layer"),
        expert=_expert(values) if values["expert"].shape else None,
        is_sparse=bool(values["sparse"]),
        scalars=_scalars(values),
    )


def whole(values: Mapping[str, Any], name: str) -> int:
    """An attribute that is a whole number.

    Raises:
        KeyError: there is none of that name.
        ValueError: it is something else.
    """
    value = values[name]
    if not isinstance(value, np.integer):
        msg = f"{name} is no whole number: {value!r:.80}"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    return int(value)


def _row(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = values[name]
    if value.ndim != 1 or value.dtype.kind not in "iu":
        msg = f"{name} is no row of whole numbers: {value!r:.80}"
        raise ValueError(msg)
    return tuple(value.tolist())


def _expert(values: Mapping[str, Any]) -> tuple[int, int]:
    row = _row(values, "expert")
    problem = expert_problem(row, shape_of(values))
    if problem:
        raise ValueError(problem)
    return row[0], row[1]


def shape_of(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The attribute "shape".

    Raises:
        KeyError: there is none.
        ValueError: it is no shape.
    """
    shape = _row(values, "shape")
    if len(shape) > _MAX_DIMS or min(shape, default=0) < 0 or math.prod(shape) >= 2**63:
        msg = f"{shape!r:.80} is no shape"
        raise ValueError(msg)
    return shape


def _known(dtype: str) -> str:
    if dtype not in schema.STORAGE:
        msg = f"{dtype!r:.80} is no dtype of a checkpoint"
        raise ValueError(msg)
    return dtype


def _scalars(values: hdf5.Attributes) -> dict[str, float]:
    scalars = json.loads(values.text("scalars")) if "scalars" in values else {}
    if not isinstance(scalars, dict) or not all(isinstance(value, (int, float)) for value in scalars.values()):
        msg = f"the scalars are no numbers by name: {scalars!r:.80}"
        raise ValueError(msg)
    return scalars


def _check_slot(param: ParamInfo, stored: TensorEntry) -> None:
    """Check that slots of the parameter itself have its shape; other slots may have their own."""
    if stored.slot == schema.BUFFER_SLOT:
        msg = f"{param.name} has a slot that is named as buffers are"
        raise ValueError(msg)
    if stored.slot in _WHOLE_SLOTS and stored.shape != param.shape:
        msg = f"{param.name}/{stored.slot} is of shape {stored.shape} and its parameter of shape {param.shape}"
        raise ValueError(msg)


def _read_aliases(file: h5py.File, params: Collection[str]) -> dict[str, str]:
    aliases = json.loads(hdf5.read_text(file.id, schema.ALIASES))
    if not isinstance(aliases, dict) or not all(isinstance(canonical, str) for canonical in aliases.values()):
        msg = f"the aliases are no names by name: {aliases!r:.80}"
        raise ValueError(msg)
    for alias, canonical in aliases.items():
        if canonical not in params or alias in params:
            msg = f"alias {alias!r:.80} of {canonical!r:.80}: the one must not be a parameter and the other must"
            raise ValueError(msg)
    return aliases


class _TensorReader:
    """Reader of tensors' places; follows links only to listed data files, and there only to the tensor's own path."""

    def __init__(self, sums: h5g.GroupID, model_bytes: int, others: Mapping[str, tuple[h5py.File, int]]) -> None:
        self._sums, self._model_bytes, self._others = sums, model_bytes, others
        self.found: dict[tuple[str, str], TensorEntry] = {}
        self._last: tuple[str, h5g.GroupID] | None = None

    def read(self, name: str, slot: str, home: h5g.GroupID, link: str) -> TensorEntry:
        """Add and return the tensor that `link` of the group `home` is, or leads to."""
        target = hdf5.external_target(home, link)
        file, size = schema.MODEL_FILE, self._model_bytes
        if target is not None:
            file, path = target
            if file not in self._others or path != schema.dataset_path(name, slot):
                msg = f"{schema.dataset_path(name, slot)} is a link to {path} in {file!r}, which is no place for it"
                raise ValueError(msg)
            other, size = self._others[file]
            *groups, last = path[1:].split("/")
            parent: h5g.GroupID = other.id
            for part in groups:
                parent = hdf5.child_group(parent, part)
            home, link = parent, last
        dataset, offset = _placed(home, link)
        table, table_offset = _placed(self._sums_of(name), schema.escape(slot))
        stored = TensorEntry(
            name=name,
            slot=slot,
            shape=dataset.shape,
            dtype=stored_dtype(dataset),
            offset=offset,
            table_offset=table_offset,
            file=file,
        )
        self._check_place(stored, table, size)
        self.found[name, slot] = stored
        return stored

    def _sums_of(self, name: str) -> h5g.GroupID:
        """The group of checksum tables of a parameter or buffer; the last one is cached."""
        if self._last is None or self._last[0] != name:
            self._last = (name, hdf5.child_group(self._sums, schema.escape(name)))
        return self._last[1]

    def check_apart(self) -> None:
        """Check that no two tensors or checksum tables share bytes."""
        extents = []
        for stored in self.found.values():
            if stored.numel:
                table_bytes = schema.block_count(stored.size_bytes) * schema.STORAGE["uint32"].itemsize
                label = f"{stored.name}/{stored.slot}"
                extents.append((stored.file, stored.offset, stored.size_bytes, label))
                extents.append((schema.MODEL_FILE, stored.table_offset, table_bytes, f"checksums of {label}"))
        extents.sort()
        for (file, start, length, label), (next_file, next_start, _, next_label) in itertools.pairwise(extents):
            if file == next_file and start + length > next_start:
                msg = f"{label} and {next_label} share bytes of {file}"
                raise ValueError(msg)

    def _check_place(self, stored: TensorEntry, table: h5d.DatasetID, file_bytes: int) -> None:
        if not stored.numel:
            return
        table_bytes = schema.block_count(stored.size_bytes) * schema.STORAGE["uint32"].itemsize
        has_table = table.shape == (table_bytes // 4,) and table.dtype == schema.STORAGE["uint32"]
        ends_inside = stored.offset >= 0 and stored.offset + stored.size_bytes <= file_bytes
        table_inside = stored.table_offset >= 0 and stored.table_offset + table_bytes <= self._model_bytes
        if not (has_table and ends_inside and table_inside):
            msg = f"{stored.name}/{stored.slot} or its checksums have no place in the file"
            raise ValueError(msg)


def _placed(home: h5g.GroupID, link: str) -> tuple[h5d.DatasetID, int]:
    """A dataset and the offset at which its elements are read; -1 for none."""
    dataset = hdf5.child_place(home, link)
    offset = dataset.get_offset()
    # without an offset there are none, or they do not lie in one piece of this file
    if offset is None or dataset.dtype not in _STORED:
        hdf5.check_bytes(home, link, dataset)
    if dataset.dtype not in _STORED:
        msg = f"{link!r:.80} is of type {dataset.dtype}, as no tensor of a checkpoint is"
        raise ValueError(msg)
    return dataset, -1 if offset is None else int(offset)


def stored_dtype(dataset: h5d.DatasetID) -> str:
    """The dtype name of a dataset; a ValueError or CheckpointError if it is none of the format."""
    if h5py.h5a.exists(dataset, b"dtype"):
        name = _known(hdf5.attributes(dataset).text("dtype"))
        if schema.STORAGE[name] != dataset.dtype:
            msg = f"elements of type {dataset.dtype} do not stand for {name}"
            raise ValueError(msg)
        return name
    return schema.native_name(dataset.dtype)


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
