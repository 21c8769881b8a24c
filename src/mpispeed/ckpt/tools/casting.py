"""Conversion of stored elements to another dtype. No torch, except for targets of 8 bits."""

from __future__ import annotations

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import numbers, schema

_QUIET_NAN = np.uint16(0x7FC0)


def cast(stored: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert by value, rounding to the nearest and to even, as torch does.

    Args:
        stored: flat, of the storage dtype of `source`.
        source: dtype name of the elements.
        target: dtype name wanted, of a floating dtype unless it equals `source`.

    Shapes:
        result: as `stored`, of the storage dtype of `target`; `stored` itself when the dtypes are equal.

    Raises:
        CheckpointError: elements of `source` are no real numbers, or `target` is not floating.
    """
    if source == target:
        return stored
    if not (numbers.is_float(source) and numbers.is_float(target)):
        msg = f"elements of {source} cannot be converted to {target}; only floating dtypes are converted"
        raise CheckpointError(msg)
    values = numbers.as_numbers(stored, source)
    if target == "bfloat16":
        return _bfloat16(values)
    if target.startswith("float8"):
        return _float8(values, target)
    with np.errstate(over="ignore", invalid="ignore"):
        made: np.ndarray = values.astype(schema.STORAGE[target])
    return made


def count_overflows(stored: np.ndarray, source: str, made: np.ndarray, target: str) -> int:
    """Number of finite elements that became infinite (or NaN, where there is no infinity)."""
    if source == target:
        return 0
    became = int(np.count_nonzero(~np.isfinite(numbers.as_numbers(made, target))))
    return became and became - int(np.count_nonzero(~np.isfinite(numbers.as_numbers(stored, source))))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    # half of the last kept bit, less one where that bit is 0: ties go to even
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    made: np.ndarray = rounded.astype("<u2")
    made[(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)] = _QUIET_NAN
    return made


def _float8(values: np.ndarray, target: str) -> np.ndarray:
    import torch  # numpy has no such number

    made = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(getattr(torch, target))
    bits: np.ndarray = made.view(torch.uint8).numpy()
    return bits
