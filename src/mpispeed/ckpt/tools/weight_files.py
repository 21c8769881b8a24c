"""Writers of weight files for other programs, a part at a time. torch only for its own format."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from h5py import h5g, h5p, h5t

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import hdf5, kinds, schema, sparse_image
from mpispeed.ckpt.format.index import TensorEntry

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
#: entry of the metadata of a safetensors file that names the framework
_FRAMEWORK = "format"
#: attributes of the root of an HDF5 file of weights
HDF5_FORMAT, HDF5_VERSION = "mpispeed weights", (1, 0)
_METADATA = "__metadata__"
_EARLIEST = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to write.

    Attributes:
        name: the name to write it under.
        aliases: other names of the same tensor.
        source: the stored tensor with its elements.
        dtype: dtype name to write.
        facts: attributes of it in an HDF5 file.
    """

    name: str
    aliases: tuple[str, ...]
    source: TensorEntry
    dtype: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.source.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements as they are written."""
        return math.prod(self.shape) * schema.STORAGE[self.dtype].itemsize


#: gives the elements of a weight in order as bytes of its dtype; each part is of use until the next
Elements = Callable[[Weight], Iterator[memoryview]]
#: makes a new file of weights
Writer = Callable[[Path, Sequence[Weight], Elements], None]


def write_safetensors(path: Path, weights: Sequence[Weight], elements: Elements) -> None:
    """Write a safetensors file; each tensor once, aliases as entries alias -> name of its metadata.

    Raises:
        CheckpointError: the format has no place for a dtype or a name.
        OSError: the file system refuses.
    """
    # large elements first, so that each tensor is aligned to its own elements
    order = sorted(weights, key=lambda w: (-schema.STORAGE[w.dtype].itemsize, w.name))
    if any(weight.name == _METADATA or _FRAMEWORK in weight.aliases for weight in order):
        msg = f'a tensor named "{_METADATA}" or an alias named "{_FRAMEWORK}" has no place in a safetensors file'
        raise CheckpointError(msg)
    metadata = {_FRAMEWORK: "pt"}
    for alias, name in sorted((alias, weight.name) for weight in order for alias in weight.aliases):
        metadata[alias] = name
    header: dict[str, Any] = {_METADATA: metadata}
    position = 0
    for weight in order:
        if weight.dtype not in _SAFETENSORS:
            raise _no_place("safetensors", weight)
        ends = [position, position + weight.size_bytes]
        header[weight.name] = {"dtype": _SAFETENSORS[weight.dtype], "shape": list(weight.shape), "data_offsets": ends}
        position += weight.size_bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
        for weight in order:
            for part in elements(weight):
                _write_all(file, part)
        os.fsync(file.fileno())


def write_torch(path: Path, weights: Sequence[Weight], elements: Elements) -> None:
    """Write a torch state dict, which is built in memory first. Aliases share storage with their tensor.

    Raises:
        OSError: the file system refuses.
    """
    import torch  # tools that write other formats do without

    from mpispeed.ckpt.format import schema

    state: dict[str, torch.Tensor] = {}
    for weight in weights:
        flat = torch.empty(math.prod(weight.shape), dtype=schema.torch_dtype(weight.dtype))
        raw, position = schema.as_bytes(flat), 0
        for part in elements(weight):
            raw[position : position + len(part)] = part
            position += len(part)
        whole = flat.reshape(weight.shape)
        for name in (weight.name, *weight.aliases):
            state[name] = whole
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_npz(path: Path, weights: Sequence[Weight], elements: Elements) -> None:
    """Write an uncompressed npz file. It knows no ties: an alias is a second copy.

    Raises:
        CheckpointError: numpy has no such dtype.
        OSError: the file system refuses.
    """
    for weight in weights:
        if weight.dtype in schema.BIT_PATTERNS:
            raise _no_place("npz", weight)
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for weight in weights:
                for name in (weight.name, *weight.aliases):
                    with archive.open(zipfile.ZipInfo(f"{name}.npy", _EARLIEST), "w", force_zip64=True) as member:
                        _write_npy(member, weight, elements(weight))
        file.flush()
        os.fsync(file.fileno())


def _write_npy(member: IO[bytes], weight: Weight, parts: Iterable[memoryview]) -> None:
    descr = np.lib.format.dtype_to_descr(schema.STORAGE[weight.dtype])
    header = {"descr": descr, "fortran_order": False, "shape": weight.shape}
    np.lib.format.write_array_header_2_0(member, header)
    for part in parts:
        member.write(part)


def write_hdf5(path: Path, weights: Sequence[Weight], elements: Elements) -> None:
    """Write one contiguous dataset per tensor at the top of an HDF5 file; an alias is a hard link.

    Names are escaped and bit patterns marked as in a checkpoint.

    Raises:
        OSError: the file system refuses.
    """
    with hdf5.Builder(path) as build:
        build.attribute(build.root, kinds.FORMAT, HDF5_FORMAT)
        build.attribute(build.root, kinds.VERSION, HDF5_VERSION)
        places = [
            build.dataset(build.root, schema.escape(weight.name), weight.shape, weight.dtype, weight.facts)
            for weight in weights
        ]
        top = h5g.open(build.root, b"/")
        utf8 = h5p.create(h5p.LINK_CREATE)
        utf8.set_char_encoding(h5t.CSET_UTF8)
        for weight in weights:
            for alias in weight.aliases:
                top.links.create_hard(
                    schema.escape(alias).encode(), top, schema.escape(weight.name).encode(), lcpl=utf8
                )
    with path.open("r+b", buffering=0) as file:
        for weight, place in zip(weights, places, strict=True):
            for part in elements(weight):
                sparse_image.write_at(file.fileno(), part, place)
                place += len(part)
        os.fsync(file.fileno())


def _write_all(file: IO[bytes], data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _no_place(form: str, weight: Weight) -> CheckpointError:
    return CheckpointError(
        f"{form} has no place for {weight.dtype}, the dtype of {weight.name!r}; export another dtype"
    )
