"""CRC-32C (Castagnoli) of buffers, and of joined buffers from the checksums of both."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpispeed.native import status

_POLYNOMIAL = 0x82F63B78  # bits reversed: bit 31 is x^0
_ONE = 0x80000000
_REFERENCE_LANES = 1024
_Words = npt.NDArray[np.uint32]


def crc32c(buffer: Any, value: int = 0) -> int:
    """Checksum of `buffer`, continued from the checksum `value` of the bytes before it.

    `buffer` is a contiguous object with the buffer protocol, or a contiguous tensor on the host
    (of every dtype, bf16 too). The interpreter lock is released.

    Raises:
        ValueError: `value` is not a 32-bit checksum, or a tensor is not contiguous or not on the host.
        BufferError: the buffer is not contiguous.
    """
    _check_words("crc32c", value)
    module = status.compiled("crc32c")
    if module is None:
        return crc32c_reference(buffer, value)
    if _is_tensor(buffer):
        count = _check_tensor(buffer) * buffer.element_size()
        crc: int = module.update_at(buffer.data_ptr(), count, value)
    else:
        crc = module.update(buffer, value)
    return crc


def crc32c_combine(crc1: int, crc2: int, length2: int) -> int:
    """Checksum of A followed by B, from the checksums of A and B and the length of B.

    Units: `length2` is in bytes.

    Raises:
        ValueError: a checksum does not fit in 32 bits, or the length is negative.
    """
    _check_words("crc32c_combine", crc1, crc2)
    if length2 < 0:
        msg = f"crc32c_combine: length2 is {length2} bytes; a length cannot be negative"
        raise ValueError(msg)
    module = status.compiled("crc32c")
    if module is None:
        return crc32c_combine_reference(crc1, crc2, length2)
    crc: int = module.combine(crc1, crc2, length2)
    return crc


def crc32c_reference(buffer: Any, value: int = 0) -> int:
    """As `crc32c`, in numpy: equal lanes of a long buffer advance together and are then combined.

    Raises:
        ValueError: a tensor is not contiguous or not on the host.
    """
    data = _as_bytes(buffer)
    lane_bytes = len(data) // _REFERENCE_LANES
    if lane_bytes >= 64:
        bulk = lane_bytes * _REFERENCE_LANES
        crc = _fold(_advance(data[:bulk].reshape(_REFERENCE_LANES, lane_bytes)), lane_bytes)
        value = crc32c_combine_reference(value, crc, bulk)
        data = data[bulk:]
    table = _table().tolist()
    crc = value ^ 0xFFFFFFFF
    for byte in data.tolist():
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c_combine_reference(crc1: int, crc2: int, length2: int) -> int:
    """The same as `crc32c_combine`, in Python: appending bytes multiplies a checksum by a power of x."""
    return int(_multiply(np.array([crc1], np.uint32), _shift_factor(length2))[0]) ^ crc2


def _check_words(where: str, *values: int) -> None:
    for value in values:
        if not 0 <= value <= 0xFFFFFFFF:
            msg = f"{where}: {value} is not a 32-bit checksum"
            raise ValueError(msg)


def _is_tensor(buffer: Any) -> bool:
    torch = sys.modules.get("torch")  # tools that read files do without; a tensor is only here when it is loaded
    return torch is not None and isinstance(buffer, torch.Tensor)


def _check_tensor(buffer: Any) -> int:
    from mpispeed.native.status import check_tensors

    return check_tensors("crc32c", {"buffer": buffer})


def _as_bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    if _is_tensor(buffer):
        import torch  # loaded already

        _check_tensor(buffer)
        view: npt.NDArray[np.uint8] = buffer.detach().reshape(-1).view(torch.uint8).numpy()
        return view
    return np.frombuffer(buffer, np.uint8)


@cache
def _table() -> _Words:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(_POLYNOMIAL), crc >> 1).astype(np.uint32)
    return crc


def _multiply(a: _Words, factor: int) -> _Words:
    """Products of polynomials modulo the CRC polynomial, for each element of `a`."""
    product = np.zeros_like(a)
    for bit in range(32):
        if factor & (_ONE >> bit):
            product ^= a
        a = np.where(a & 1, (a >> 1) ^ np.uint32(_POLYNOMIAL), a >> 1).astype(np.uint32)
    return product


def _shift_factor(length: int) -> int:
    """The power x^(8 length) modulo the polynomial."""
    factor, power = np.array([_ONE], np.uint32), _ONE >> 8
    while length:
        if length & 1:
            factor = _multiply(factor, power)
        power = int(_multiply(np.array([power], np.uint32), power)[0])
        length >>= 1
    return int(factor[0])


def _advance(lanes: npt.NDArray[np.uint8]) -> _Words:
    table = _table()
    crc = np.full(lanes.shape[0], 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(lanes.T):
        crc = (crc >> np.uint32(8)) ^ table[(crc ^ column) & np.uint32(0xFF)]
    done: _Words = crc ^ np.uint32(0xFFFFFFFF)
    return done


def _fold(crcs: _Words, length: int) -> int:
    """Checksum of equally long neighbours, joined pairwise; their number is a power of two."""
    while len(crcs) > 1:
        crcs = _multiply(crcs[0::2], _shift_factor(length)) ^ crcs[1::2]
        length *= 2
    return int(crcs[0])
