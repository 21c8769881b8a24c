"""Names, versions, dtypes and attribute spelling of the checkpoint format, and bytes of tensors. No I/O.

torch is only imported where a tensor is at hand or asked for: tools that read files do without.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.errors import CheckpointError

if TYPE_CHECKING:
    import torch


FORMAT = "mpispeed-checkpoint"
#: of the files in DATA_FOLDER
DATA_FORMAT = "mpispeed-checkpoint-data"
VERSION = (2, 0)

MODEL_FILE = "model.h5"
STATE_FILE = "state.h5"
MANIFEST_FILE = "manifest.json"
DATA_FOLDER = "data"
LATEST_FILE = "latest"

PARAMS = "params"
BUFFERS = "buffers"
ALIASES = "aliases"
INTEGRITY = "integrity"
STATE = "state"
RNG = "rng"
CONFIG = "config"

#: slot name of a buffer; parameters may not use it
BUFFER_SLOT = "buffer"
#: slot that holds the fp32 copy; listed first
MASTER_SLOT = "master"

#: bytes covered by one checksum of `/integrity`
BLOCK_BYTES = 4 << 20
#: datasets of at least this many bytes start at a multiple of ALIGN_BYTES
ALIGN_THRESHOLD_BYTES = 64 << 10
ALIGN_BYTES = 4 << 10

#: torch dtype name -> numpy dtype of the stored bytes
STORAGE: dict[str, np.dtype] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
    "float8_e4m3fnuz": np.dtype("u1"),
    "float8_e5m2fnuz": np.dtype("u1"),
    "float8_e8m0fnu": np.dtype("u1"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint64": np.dtype("<u8"),
    "uint32": np.dtype("<u4"),
    "uint16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
}

#: dtypes HDF5 has no type for: stored as bit patterns with an attribute `dtype`
BIT_PATTERNS = frozenset(name for name in STORAGE if name.startswith(("bfloat16", "float8")))

_NATIVE_NAMES = {storage: name for name, storage in STORAGE.items() if name not in BIT_PATTERNS}

_ESCAPED = re.compile(r"%([0-9A-F]{2})")
_DATA_FILE = re.compile(rf"{DATA_FOLDER}/d\d{{5,}}\.h5")


def dtype_name(dtype: str | torch.dtype) -> str:
    """The format's name of a dtype: torch's own, without the prefix.

    Raises:
        CheckpointError: the format has no place for this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in STORAGE:
        msg = f"dtype {name} cannot be stored in a checkpoint; known: {', '.join(STORAGE)}"
        raise CheckpointError(msg)
    return name


def native_name(storage: np.dtype) -> str:
    """The dtype name of a dataset that carries no `dtype` attribute.

    Raises:
        CheckpointError: no dtype of the format is stored this way.
    """
    try:
        return _NATIVE_NAMES[storage]
    except KeyError:
        msg = f"datasets of type {storage} are not part of the checkpoint format"
        raise CheckpointError(msg) from None


def escape(name: str) -> str:
    """The HDF5 link or attribute name of `name`: '/', '%' and NUL percent-escaped, everything else kept.

    The empty name becomes "%", and "." is escaped because HDF5 reads it as "this group". Names that
    start with "%" and are not produced here are free for the format's own markers.

    Raises:
        CheckpointError: the name is not valid Unicode text.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        msg = f"the name {name!r} is not valid Unicode and cannot be stored in a checkpoint; rename it"
        raise CheckpointError(msg) from None
    if name == "":
        return "%"
    if name == ".":
        return "%2E"
    return name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def unescape(stored: str) -> str:
    """The name that `escape` turned into `stored`."""
    if stored == "%":
        return ""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), stored)


def data_file(number: int) -> str:
    """Name of a file with elements, relative to the folder of the tag."""
    return f"{DATA_FOLDER}/d{number:05d}.h5"


def is_data_file(name: str) -> bool:
    """True if `data_file` gives this name for some number."""
    return _DATA_FILE.fullmatch(name) is not None


def dataset_path(name: str, slot: str) -> str:
    """Path of a tensor's dataset inside its file."""
    if slot == BUFFER_SLOT:
        return f"/{BUFFERS}/{escape(name)}"
    return f"/{PARAMS}/{escape(name)}/{escape(slot)}"


def slot_order(slot: str) -> tuple[bool, str]:
    """Sort key of slots within a parameter: the master first, then by name."""
    return (slot != MASTER_SLOT, slot)


def block_count(size_bytes: int) -> int:
    """Number of checksums that cover `size_bytes` bytes."""
    return -(-size_bytes // BLOCK_BYTES)


def check_version(version: tuple[int, int], source: str) -> str:
    """Refuse another major version; return a warning for a newer minor one, else "".

    Raises:
        CheckpointError: `version` is of another major.
    """
    written = f"{version[0]}.{version[1]}"
    known = f"{VERSION[0]}.{VERSION[1]}"
    if version[0] > VERSION[0]:
        msg = f"{source} has checkpoint format {written}, this library reads up to {known}; install a newer mpispeed"
        raise CheckpointError(msg)
    if version[0] < VERSION[0]:
        msg = f"{source} has checkpoint format {written}, this library reads {known}; load it with an older mpispeed"
        raise CheckpointError(msg)
    if version[1] > VERSION[1]:
        return f"{source} has checkpoint format {written}, newer than {known}: what that added is ignored"
    return ""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name of the format."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name(name))
    return dtype


def as_bytes(values: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor, writable and without a copy."""
    import torch

    flat = values.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def as_array(values: torch.Tensor) -> np.ndarray:
    """A tensor of any device and strides as a numpy array of the storage dtype, same shape."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    storage = STORAGE[dtype_name(values.dtype)]
    return np.frombuffer(as_bytes(flat), dtype=storage).reshape(tuple(values.shape))


def from_array(array: np.ndarray, name: str) -> torch.Tensor:
    """The tensor of dtype `name` whose stored form is `array`; owns its memory."""
    import torch

    out = torch.empty(math.prod(array.shape), dtype=torch_dtype(name))
    as_bytes(out)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return out.reshape(array.shape)
