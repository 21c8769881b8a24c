"""Files of a tag that one rank makes: the layout of those that hold tensors, and state.h5.

The layout is there before any element is written. With one file, model.h5 has the elements itself. With more, whole
parameters are distributed over data files, and model.h5, which is still the file to open, has external links to them.
state.h5 has counters, schedules, generators, client state and config; it is small.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5g

from mpispeed.base.version import VERSION
from mpispeed.ckpt.format import hdf5, schema, tree
from mpispeed.ckpt.format.index import read_root, translated, whole
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo


def _none() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Places:
    """Offsets of each tensor's elements and checksums, in the order in which tensors were passed.

    Attributes:
        files: names of the files with elements, relative to the folder of the tag.
        which: index into `files`.
        data: in that file; -1 for tensors without elements.
        tables: in model.h5; -1 for tensors without elements.

    Shapes:
        which, data, tables: int64 [tensors]

    Units:
        data, tables: bytes from the start of the file
    """

    files: tuple[str, ...] = (schema.MODEL_FILE,)
    which: np.ndarray = field(default_factory=_none)
    data: np.ndarray = field(default_factory=_none)
    tables: np.ndarray = field(default_factory=_none)

    def streams(self) -> list[np.ndarray]:
        """For each file the indices of its tensors that have elements, in the order of the file."""
        order = np.argsort(self.data, kind="stable")
        order = order[self.data[order] >= 0]
        return [order[self.which[order] == file] for file in range(len(self.files))]


def create(
    folder: Path,
    *,
    tag: str,
    global_step: int,
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str],
    files: int = 1,
) -> Places:
    """Create model.h5 and the data files with all their objects; elements and checksums are left to be written.

    The order in the files is canonical (sorted by name, the master first within a parameter), so the
    bytes do not depend on the order or the layout of the caller, only on the number of files.

    Args:
        folder: where they are made.
        tag: goes into every file.
        global_step: goes into model.h5.
        params: attributes of all parameters.
        tensors: what there is to store.
        aliases: other names of parameters.
        files: how many files hold elements; no more are made than there are names to deal.

    Raises:
        OSError: the file system refuses.
    """
    order = _canonical(tensors)
    which = _deal(tensors, order, files)
    count = int(which.max(initial=0)) + 1
    names = (schema.MODEL_FILE,) if count == 1 else tuple(schema.data_file(number) for number in range(count))
    places = Places(names, which, np.full(len(tensors), -1, np.int64), np.full(len(tensors), -1, np.int64))
    with ExitStack() as stack:
        model = stack.enter_context(hdf5.Builder(folder / schema.MODEL_FILE))
        top = _Homes(model)
        homes = [top]
        write_root(model, schema.FORMAT, tag)
        model.attribute(model.root, "global_step", global_step)
        if count > 1:
            (folder / schema.DATA_FOLDER).mkdir()
            homes = [_Homes(stack.enter_context(hdf5.Builder(folder / name))) for name in names]
            for number, home in enumerate(homes):
                write_root(home.build, schema.DATA_FORMAT, tag)
                home.build.attribute(home.build.root, "part", (number, count))
        _fill(top, homes, params, tensors, order, places, aliases)
    return places


class _Homes:
    """The groups of a file that hold tensors."""

    def __init__(self, build: hdf5.Builder) -> None:
        self.build = build
        self.params = build.group(build.root, schema.PARAMS)
        self.buffers = build.group(build.root, schema.BUFFERS)


def _fill(
    top: _Homes,
    homes: Sequence[_Homes],
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    order: Mapping[tuple[bool, str], list[int]],
    places: Places,
    aliases: Mapping[str, str],
) -> None:
    """Groups, attributes, datasets, links between files, and tables of checksums."""
    model, has_links = top.build, len(homes) > 1
    sums = model.group(model.root, schema.INTEGRITY)
    for param in sorted(params, key=lambda p: p.name):
        _param_attributes(model, model.group(top.params, schema.escape(param.name)), param)
    for (is_buffer, name), indices in order.items():
        stored = schema.escape(name)
        home = homes[int(places.which[indices[0]])]
        if is_buffer:
            inside, outside = home.buffers, top.buffers
        else:
            outside = h5g.open(top.params, stored.encode())
            inside = home.build.group(home.params, stored) if has_links else outside
        for i in indices:
            tensor = tensors[i]
            own = stored if is_buffer else schema.escape(tensor.slot)
            places.data[i] = home.build.dataset(inside, own, tensor.shape, tensor.dtype_name)
            if has_links:
                path = schema.dataset_path(name, tensor.slot)
                model.external_link(outside, own, places.files[int(places.which[i])], path)
    # After all elements, so that the parts read to verify the index lie together.
    groups: dict[str, h5g.GroupID] = {}
    for (_, name), indices in order.items():
        if name not in groups:
            groups[name] = model.group(sums, schema.escape(name))
        for i in indices:
            blocks = (schema.block_count(tensors[i].size_bytes),)
            places.tables[i] = model.dataset(groups[name], schema.escape(tensors[i].slot), blocks, "uint32")
    # as one text: an object of a checkpoint has few attributes, and models may tie many parameters
    model.text(model.root, schema.ALIASES, json.dumps(dict(sorted(aliases.items())), ensure_ascii=False))


def _canonical(tensors: Sequence[LogicalTensor]) -> dict[tuple[bool, str], list[int]]:
    """(is a buffer, name) -> its tensors with the master first; parameters before buffers, sorted by name."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.slot == schema.BUFFER_SLOT, tensor.name), []).append(index)
    for indices in groups.values():
        indices.sort(key=lambda i: schema.slot_order(tensors[i].slot))
    return dict(sorted(groups.items()))


def _deal(tensors: Sequence[LogicalTensor], order: Mapping[tuple[bool, str], list[int]], files: int) -> np.ndarray:
    """The file of each tensor: runs of whole parameters in canonical order, of about equal size; none is empty."""
    which = np.zeros(len(tensors), np.int64)
    groups = [group for group in order.values() if any(tensors[i].size_bytes for i in group)]
    files = max(1, min(files, len(groups)))
    sizes = [sum(tensors[i].size_bytes for i in group) for group in groups]
    total, before, file = sum(sizes), 0, 0
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        # by the middle of the parameter; every file gets one at least, and none is left over
        wanted = (2 * before + size) * files // (2 * total)
        file = min(max(wanted, files - (len(groups) - number)), file + (number > 0), files - 1)
        which[group] = file
        before += size
    return which


def write_root(build: hdf5.Builder, form: str, tag: str) -> None:
    """Write the root attributes of a file of a checkpoint."""
    build.attribute(build.root, "format", form)
    build.attribute(build.root, "version", schema.VERSION)
    build.attribute(build.root, "framework_version", VERSION)
    build.attribute(build.root, "tag", tag)
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
        "tp_grains": tuple(param.tp_grains),
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


#: what a generator state may be passed as
RngBytes = Any


def rng_bytes(value: RngBytes) -> bytes:
    """The state of one generator as bytes, from bytes, a uint8 array or a uint8 tensor."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    array = np.asarray(value)
    if array.dtype != np.uint8:
        msg = f"generator states are bytes or uint8 arrays, found {array.dtype}"
        raise TypeError(msg)
    return array.tobytes()


def write_state(
    path: Path,
    *,
    tag: str,
    global_step: int,
    state: Mapping[str, Any],
    config_json: str,
    rng_by_rank: Sequence[Mapping[str, bytes]],
    layout: Mapping[str, Any],
) -> None:
    """Write the whole of state.h5.

    Args:
        path: the new file.
        tag: the tag it belongs to.
        global_step: the step it belongs to.
        state: a typed tree; every top-level name becomes a group or attribute of `/state`.
        config_json: the configuration text as used.
        rng_by_rank: for every rank, generator kind -> bytes of its state.
        layout: sizes of the axes; says to which coordinates the ranks of the generators belong.

    Raises:
        OSError: the file system refuses.
    """
    with hdf5.Builder(path) as build:
        write_root(build, schema.FORMAT, tag)
        build.attribute(build.root, "global_step", global_step)
        tree.write(build, build.root, schema.CONFIG, {"json": config_json})
        tree.write(build, build.root, schema.STATE, dict(state))
        generators = build.group(h5g.open(build.root, schema.STATE.encode()), schema.RNG)
        for kind in sorted({kind for own in rng_by_rank for kind in own}):
            rows = [own.get(kind, b"") for own in rng_by_rank]
            table = np.zeros((len(rows), max(map(len, rows))), np.uint8)
            for row, raw in zip(table, rows, strict=True):
                row[: len(raw)] = np.frombuffer(raw, np.uint8)
            made = build.array(generators, schema.escape(kind), table)
            build.attribute(made, "lengths", tuple(map(len, rows)))
            build.attribute(made, "axis", ",".join(layout.get("axes", {})))


@dataclass(frozen=True, slots=True)
class StateContent:
    """Content of a state.h5 beside the state tree.

    Attributes:
        tag: the tag it belongs to.
        global_step: the step it belongs to.
        config: the configuration text.
        generators: kind -> states of all ranks that saved and their lengths.

    Shapes:
        generators: uint8 [ranks, longest], int64 [ranks]
    """

    tag: str
    global_step: int
    config: str
    generators: dict[str, tuple[np.ndarray, np.ndarray]]

    def rng(self, kind: str, rank: int) -> bytes:
        """State of one generator of one rank; empty for a rank that had none."""
        table, lengths = self.generators[kind]
        return bytes(table[rank, : lengths[rank]].tobytes())


def decode_state(path: Path, raw: bytes, make_tensor: tree.TensorMaker | None = None) -> dict[str, Any]:
    """The state tree in the bytes `raw` of a state.h5; `path` is for messages, `make_tensor` as in `tree.read`.

    Raises:
        CorruptCheckpoint: the bytes are no state.h5.
    """
    with translated(path), hdf5.open_reading(io.BytesIO(raw)) as file:
        state: dict[str, Any] = tree.read(file.id, schema.STATE, make_tensor)
        if type(state) is not dict:
            msg = f"its state is no dict: {state!r:.80}"
            raise ValueError(msg)
        return state


def decode_content(path: Path, raw: bytes) -> StateContent:
    """The content beside the state tree in the bytes `raw` of a state.h5; `path` is for messages.

    Raises:
        CorruptCheckpoint: the bytes are no state.h5.
    """
    with translated(path), hdf5.open_reading(io.BytesIO(raw)) as file:
        attributes = read_root(file, schema.FORMAT, path)
        config = str(tree.read(file.id, schema.CONFIG)["json"])
        generators = {schema.unescape(kind): _table(stored) for kind, stored in _generators(file)}
        return StateContent(attributes.text("tag"), whole(attributes, "global_step"), config, generators)


def _table(stored: h5py.Dataset) -> tuple[np.ndarray, np.ndarray]:
    table, lengths = stored[()], np.asarray(hdf5.attributes(stored.id)["lengths"])
    is_table = table.ndim == 2 and table.dtype == np.uint8
    is_table = is_table and lengths.dtype.kind == "i" and lengths.shape == table.shape[:1]
    if not is_table or (lengths.size and not 0 <= lengths.min() <= lengths.max() <= table.shape[1]):
        msg = f"{stored.name} is no table of generator states: {table.dtype} {table.shape}, lengths {lengths.shape}"
        raise ValueError(msg)
    return table, lengths


def _generators(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    group = hdf5.child_group(hdf5.child_group(file.id, schema.STATE), schema.RNG)
    left_bytes = file.id.get_filesize()
    for kind in hdf5.names(group):
        stored = h5py.Dataset(hdf5.child_dataset(group, kind))
        left_bytes -= stored.nbytes
        if left_bytes < 0:
            msg = f"{stored.name} and what was read before take more bytes than the file has"
            raise ValueError(msg)
        yield kind, stored
