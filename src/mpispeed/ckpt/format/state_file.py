"""state.h5: counters, schedules, generators, client state and config; small, written by one rank."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5g

from mpispeed.ckpt.format import hdf5, model_file, schema, tree
from mpispeed.ckpt.format.index import read_root, translated, whole

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


def write(
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
        model_file.write_root(build, schema.FORMAT, tag)
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
class Content:
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


def decode(path: Path, raw: bytes) -> Content:
    """The content beside the state tree in the bytes `raw` of a state.h5; `path` is for messages.

    Raises:
        CorruptCheckpoint: the bytes are no state.h5.
    """
    with translated(path), hdf5.open_reading(io.BytesIO(raw)) as file:
        attributes = read_root(file, schema.FORMAT, path)
        config = str(tree.read(file.id, schema.CONFIG)["json"])
        generators = {schema.unescape(kind): _table(stored) for kind, stored in _generators(file)}
        return Content(attributes.text("tag"), whole(attributes, "global_step"), config, generators)


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
