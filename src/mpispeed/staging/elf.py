"""Makes the library paths of ELF files (RPATH, RUNPATH) relative, so that moved programs find what moved with them.

Format: System V ABI, chapters 4 and 5; only 64-bit little-endian files have their paths changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

_LOAD, _DYNAMIC = 1, 2
_STRINGS, _RPATH, _RUNPATH = 5, 15, 29


def relocated(data: bytes, moved: Callable[[str], str]) -> bytes | None:
    """The file with every library path that `moved` changes; None if nothing has to change, or cannot.

    Args:
        data: the file.
        moved: new name for a folder of a path, or the same; a longer path than the old one does not fit, and stays.
    """
    try:
        return _relocated(data, moved)
    except (struct.error, IndexError, ValueError):
        return None  # cut off, or no ELF file at all: the loader will refuse it as before


def _relocated(data: bytes, moved: Callable[[str], str]) -> bytes | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    changed = None
    for start in _path_offsets(data):
        end = data.index(b"\0", start)
        old = data[start:end].decode()
        new = ":".join(dict.fromkeys(moved(folder) for folder in old.split(":")))
        if new != old and len(new.encode()) <= end - start:
            changed = bytearray(data) if changed is None else changed
            changed[start:end] = new.encode().ljust(end - start, b"\0")
    return None if changed is None else bytes(changed)


def _path_offsets(data: bytes) -> Iterator[int]:
    """Positions of the library paths in the file."""
    table, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * size) for number in range(count)]
    loads = [(address, offset, length) for kind, _, offset, address, _, length in headers if kind == _LOAD]
    for kind, _, offset, _, _, length in headers:
        if kind != _DYNAMIC:
            continue
        entries = list(struct.iter_unpack("<QQ", data[offset : offset + length // 16 * 16]))
        address = next((value for tag, value in entries if tag == _STRINGS), None)
        base = next(
            (at + address - low for low, at, size in loads if address is not None and low <= address < low + size), None
        )
        if base is not None:
            yield from (base + value for tag, value in entries if tag in (_RPATH, _RUNPATH))
