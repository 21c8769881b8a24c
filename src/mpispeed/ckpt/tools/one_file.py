"""Descriptions of one HDF5 file of a checkpoint, or of exported weights; reads no elements of parameters. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpispeed.ckpt.format import hdf5, index, kinds, schema, tag_files
from mpispeed.ckpt.format.index import translated, whole
from mpispeed.ckpt.tools import packed_weights

#: of a state file; larger ones are not taken into memory to be described
_MOST_STATE_BYTES = 1 << 30


def describe(path: Path) -> dict[str, Any]:
    """What model.h5, state.h5 or a data file of a checkpoint says, as values of JSON.

    Returns:
        part ("model", "state" or "data"), tag, saved_by; of the model step, parameters and buffers (how many); of the
        state step, the keys of the state, generators (kind -> ranks) and the configuration; of data part_number and
        parts.

    Raises:
        CorruptCheckpoint: HDF5 cannot make sense of it.
        CheckpointError: it is of another format or version.
    """
    with translated(path), kinds.opened(path) as file:
        form = kinds.of_root(file.id).form
        attributes = index.read_root(file, form, path)
        told: dict[str, Any] = {
            "part": "data",
            "tag": attributes.text("tag"),
            "saved_by": f"mpispeed {attributes.text('framework_version')}",
        }
        if form == schema.DATA_FORMAT:
            number, count = attributes["part"].tolist()
            return {**told, "part_number": number, "parts": count}
        told |= {"step": whole(attributes, "global_step")}
        if not file.id.links.exists(schema.STATE.encode()):
            params, buffers = (hdf5.child_group(file.id, name) for name in (schema.PARAMS, schema.BUFFERS))
            counts = {"parameters": params.get_num_objs(), "buffers": buffers.get_num_objs()}
            return {**told, "part": "model", **counts}
    return {**told, "part": "state", **_state(path)}


def _state(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_STATE_BYTES:
        return {"state": f"not read: the file has more than {_MOST_STATE_BYTES} bytes"}
    raw = path.read_bytes()
    state = tag_files.decode_state(path, raw, lambda array, dtype: f"tensor {dtype} {list(array.shape)}")
    content = tag_files.decode_content(path, raw)
    generators = {kind: len(lengths) for kind, (_, lengths) in content.generators.items()}
    return {"state": sorted(map(str, state)), "generators": generators, "config": content.config}


def tag_folder(path: Path) -> Path:
    """The folder of the tag that a file of a checkpoint lies in."""
    parent = path.absolute().parent
    return parent.parent if parent.name == schema.DATA_FOLDER and path.name not in _TOP_FILES else parent


_TOP_FILES = (schema.MODEL_FILE, schema.STATE_FILE)


def describe_weights(path: Path) -> dict[str, Any]:
    """What a file of weights has, as values of JSON: tensors (how many), packed (of them, as codes), bytes, dtypes.

    Raises:
        CheckpointError: (CorruptCheckpoint) it is no such file, or damaged.
    """
    rows = packed_weights.rows(path)
    return {
        "tensors": len(rows),
        "packed": sum(bool(row.bits) for row in rows),
        "bytes": sum(row.size_bytes for row in rows),
        "dtypes": sorted({row.dtype for row in rows}),
    }
