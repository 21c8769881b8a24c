"""Files of the safetensors format, mapped into memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMissing

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
#: the format allows no larger header
_HEADER_BYTES = 100_000_000


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name, read when they are used, and the texts that the writer added.

    Raises:
        ForeignMissing: there is no such file.
        ForeignCorrupt: it is not of this format, or damaged.
    """
    if not path.is_file():
        msg = f"{path} is missing"
        raise ForeignMissing(msg)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_BYTES, size - 8):
            raise _damaged(path, f"its header would have {length} bytes of {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        rows = {name: _row(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise _damaged(path, f"its header cannot be read: {type(failure).__name__}: {failure}") from failure
    data_bytes = size - 8 - length
    data = np.memmap(path, np.uint8, "c", 8 + length, data_bytes) if data_bytes else np.empty(0, np.uint8)
    whole = torch.from_numpy(data)
    tensors = {}
    for name, (dtype, shape, first, last) in rows.items():
        if not 0 <= first <= last <= data_bytes or last - first != math.prod(shape) * dtype.itemsize:
            raise _damaged(path, f"{name!r} of shape {shape} has the bytes {first} to {last} of {data_bytes}")
        part = whole[first:last]
        if part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize:
            part = part.clone()  # an element may not begin anywhere in memory
        tensors[name] = part.view(dtype).reshape(shape) if last > first else torch.empty(shape, dtype=dtype)
    return tensors, dict(header.get("__metadata__") or {})


def _row(entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    first, last = (int(place) for place in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    if any(size < 0 for size in shape):
        msg = f"shape {shape}"
        raise ValueError(msg)
    return _DTYPES[entry["dtype"]], shape, first, last


def _damaged(path: Path, problem: str) -> ForeignCorrupt:
    return ForeignCorrupt(f"{path} is damaged or no safetensors file: {problem}")
