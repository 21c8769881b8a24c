"""Format of pairs of files `NAME.bin` and `NAME.idx`: rows of integers of different lengths (Megatron's MMIDIDX).

`.bin` holds the values of all rows one after another. `.idx`, little endian: magic, u8 version 1, u1 code of the dtype,
u8 number of rows, u8 number of document marks, i4 length of each row, i8 byte offset of each row, i8 document marks
(numbers of rows; the first is 0). DeepSpeed's and Megatron's readers agree on the codes 1 to 5 only.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpispeed.base.errors import MpispeedError

Array = npt.NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, rows, document marks."""

CODES: Mapping[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"), start=1)
}
"""Types of values by DeepSpeed's codes."""

MEGATRON_CODES: Mapping[int, np.dtype[Any]] = {
    **{code: CODES[code] for code in range(1, 6)},
    **{6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2")},
}
"""Types of values by Megatron's codes."""

PIECE_ROWS = 1 << 20
"""Rows of an index that are handled at a time."""

_BUFFER_BYTES = 1 << 20

MOST_VALUES = 2**31 - 1
"""Of a row: its length is an i4."""


class IndexFileError(MpispeedError, RuntimeError):
    """A pair of files cannot be read, is damaged, or cannot hold what is to be written."""


def index_path(path: str | Path) -> Path:
    """`NAME.idx`."""
    return Path(f"{os.fspath(path)}.idx")


def data_path(path: str | Path) -> Path:
    """`NAME.bin`."""
    return Path(f"{os.fspath(path)}.bin")


def fit_dtype(low: int, high: int) -> np.dtype[Any]:
    """The smallest integer type for values from `low` to `high`; unsigned if none is negative.

    Raises:
        IndexFileError: no type holds both.
    """
    names = ("<u1", "<u2", "<u4", "<u8") if low >= 0 else ("<i1", "<i2", "<i4", "<i8")
    for dtype in map(np.dtype, names):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return dtype
    msg = f"no integer type of 64 bits holds values from {low} to {high}"
    raise IndexFileError(msg)


def plain_dtype(dtype: object) -> np.dtype[Any]:
    """The NumPy type of a NumPy or torch type of integers.

    Raises:
        IndexFileError: there is no code for it.
    """
    try:
        found = np.dtype(str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype)  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None or found.newbyteorder("<") not in CODES.values():
        msg = f"values of type {dtype} cannot be stored; take integers of 8, 16, 32 or 64 bits, signed or not"
        raise IndexFileError(msg)
    return found.newbyteorder("<")


def fitted(values: Array, dtype: np.dtype[Any], where: object) -> Array:
    """`values` in another type; floats are cut to integers, as DeepSpeed does.

    Raises:
        IndexFileError: a value does not fit; nothing wraps around.
    """
    if values.dtype == dtype or not values.size or np.can_cast(values.dtype, dtype, "safe"):
        return values.astype(dtype, copy=False)
    if values.dtype.kind not in "iufb":
        msg = f"{where}: values of type {values.dtype} cannot be stored as {dtype}"
        raise IndexFileError(msg)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        msg = f"{where}: a value is infinite or not a number; only integers are stored"
        raise IndexFileError(msg)
    low, high, limits = int(values.min()), int(values.max()), np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        msg = f"{where}: values from {low} to {high} do not fit the type {dtype}"
        raise IndexFileError(msg)
    return values.astype(dtype)


def is_index_file(path: Path) -> bool:
    """Whether an ordinary file begins as an index does."""
    try:
        file = PlainFile(path)
        return file.size >= HEAD.size and file.read(0, len(MAGIC)) == MAGIC
    except IndexFileError:
        return False


class PlainFile:
    """An ordinary file that is read by `pread`.

    Attributes:
        path: its path.
        size: bytes it had when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            IndexFileError: it is missing, may not be read, or is no ordinary file.
        """
        self.path, self._handle = path, -1
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(self._handle)
        except OSError as failure:
            msg = f"{path} cannot be read: {failure.strerror}"
            raise IndexFileError(msg) from failure
        if not stat.S_ISREG(status.st_mode):
            msg = f"{path} is no ordinary file"
            raise IndexFileError(msg)
        self.size = status.st_size

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def read(self, place: int, count: int) -> bytearray:
        """So many bytes. Raises as `read_into`."""
        out = bytearray(count)
        self.read_into(memoryview(out), place)
        return out

    def read_into(self, out: memoryview, place: int) -> None:
        """Fill a buffer of bytes.

        Raises:
            IndexFileError: the file ends before.
        """
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._handle, [out[done:]], place + done)
            except OSError as failure:
                msg = f"{self.path} cannot be read: {failure.strerror}"
                raise IndexFileError(msg) from failure
            if not count:
                msg = f"{self.path} ends at byte {place + done}; {len(out) - done} more were to be read"
                raise IndexFileError(msg)
            done += count


class OutFile:
    """A new file, or an older one emptied, that is written from its beginning; what is not closed is not complete."""

    def __init__(self, path: Path) -> None:
        """Create it, or raise an OSError."""
        self._handle, self._waiting = -1, bytearray()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def write(self, values: Array) -> None:
        """Append values as they are in memory."""
        self._waiting += np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        if len(self._waiting) >= _BUFFER_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        handle, self._handle = self._handle, -1
        os.close(handle)

    def _flush(self) -> None:
        with memoryview(self._waiting) as left:
            done = 0
            while done < len(left):
                done += os.write(self._handle, left[done:])
        self._waiting.clear()


def read_head(file: PlainFile, codes: Mapping[int, np.dtype[Any]]) -> tuple[np.dtype[Any], int, int]:
    """Type, rows and document marks, which are as many as the file has bytes for."""
    if file.size < HEAD.size or file.read(0, len(MAGIC)) != MAGIC:
        msg = f"{file.path} is no index of rows: it does not begin with MMIDIDX"
        raise IndexFileError(msg)
    _, version, code, rows, marks = HEAD.unpack(bytes(file.read(0, HEAD.size)))
    if version != 1:
        msg = f"{file.path} is an index of version {version}; only version 1 is known"
        raise IndexFileError(msg)
    if code not in codes:
        msg = f"{file.path}: {code} is no code of a type; known are {min(codes)} to {max(codes)}"
        raise IndexFileError(msg)
    wanted = HEAD.size + 12 * rows + 8 * marks  # Python's integers: nothing overflows
    if file.size != wanted and not (codes is MEGATRON_CODES and file.size == wanted + rows):  # i1 modes of rows
        msg = f"{file.path} has {file.size} bytes; with {rows} rows and {marks} document marks it should have {wanted}"
        raise IndexFileError(msg)
    return codes[code], rows, marks
