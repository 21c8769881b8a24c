"""Strict reader of safetensors files, mapped into memory; every violation of the format is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignMissing
from mpispeed.ckpt.foreign.mapping import current_notes, is_aligned, map_file, typed

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
_NOTES = "__metadata__"

#: dtype, shape, first byte, one past the last
Row = tuple[torch.dtype, tuple[int, ...], int, int]


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
        header = strict_json(raw)
        notes = _texts(header.pop(_NOTES, {}))
        rows = {_name(name): _row(name, entry) for name, entry in header.items()}
        _check_cover(rows, size - 8 - length)
        data = map_file(path)[8 + length :]
        tensors = {}
        for name, (dtype, shape, first, last) in rows.items():
            tensors[name] = _tensor(data[first:last], dtype, shape)
    except (ValueError, RecursionError) as failure:
        raise _damaged(path, str(failure)) from failure
    return tensors, notes


def _tensor(part: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    notes = current_notes()
    if notes is not None and part.numel() and not is_aligned(part, dtype):
        return notes.stand_in(part, dtype, shape)
    return typed(part, dtype).reshape(shape)


def strict_json(raw: bytes) -> dict[str, Any]:
    """An object in JSON as the standard has it: UTF-8, no name twice, no Infinity.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deep.
    """
    if not raw.startswith(b"{"):
        msg = "its JSON is no object"
        raise ValueError(msg)
    try:
        content: dict[str, Any] = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        msg = "its JSON is nested too deep"
        raise ValueError(msg) from None
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        msg = f"its JSON has the name {twice!r:.80} twice"
        raise ValueError(msg)
    return found


def _refuse_constant(text: str) -> NoReturn:
    msg = f"its JSON has {text}"
    raise ValueError(msg)


def _texts(notes: Any) -> dict[str, str]:
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        msg = f"{_NOTES} has to map names to texts and is {notes!r:.80}"
        raise ValueError(msg)
    return {_name(name): _name(text) for name, text in notes.items()}


def _name(text: str) -> str:
    text.encode()  # halves of pairs that stand for one sign are none
    return text


def _row(name: str, entry: Any) -> Row:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        msg = f"{name!r:.80} needs dtype, shape and data_offsets, and is {entry!r:.80}"
        raise ValueError(msg)
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        msg = f"{name!r:.80} has the dtype {entry['dtype']!r:.80}, which cannot be imported"
        raise ValueError(msg)
    shape, offsets = _naturals(name, entry["shape"]), _naturals(name, entry["data_offsets"])
    count = math.prod(size for size in shape if size)
    if len(offsets) != 2 or count >= 2**63 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        msg = f"{name!r:.80} of shape {shape!r:.80} and dtype {entry['dtype']} has the bytes {offsets!r:.80}"
        raise ValueError(msg)
    return dtype, shape, offsets[0], offsets[1]


def _naturals(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        msg = f"{name!r:.80} has {values!r:.80} where a row of natural numbers is expected"
        raise ValueError(msg)
    return tuple(values)


def _check_cover(rows: Mapping[str, Row], data_bytes: int) -> None:
    """Check that the tensors are contiguous, from the first byte to the last."""
    end = 0
    for name, (_, _, first, last) in sorted(rows.items(), key=lambda row: row[1][2:]):
        if first != end:
            what = "a hole before it" if first > end else "bytes in common with another tensor"
            msg = f"{name!r:.80} begins at byte {first} of the data, with {what}"
            raise ValueError(msg)
        end = last
    if end != data_bytes:
        msg = f"its tensors have {end} bytes, the file holds {data_bytes}"
        raise ValueError(msg)


def _damaged(path: Path, problem: str) -> ForeignCorrupt:
    return ForeignCorrupt(f"{path} is damaged or no safetensors file: {problem}")
