"""Layout of the files that hold tensors, made by one rank before any element is written.

With one file, model.h5 has the elements itself. With more, whole parameters are distributed over data files, and
model.h5, which is still the file to open, has external links to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from h5py import h5g

from mpispeed.base.version import VERSION
from mpispeed.ckpt.format import hdf5, schema
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
