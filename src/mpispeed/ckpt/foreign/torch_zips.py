"""Directory of zip files of `torch.save`, whose entries are uncompressed, so that they can be mapped."""

from __future__ import annotations

import os
import struct
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

START = b"PK\x03\x04"
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCAL = struct.Struct("<4s5H3L2H")
_IS_ENCRYPTED, _HAS_DESCRIPTOR, _IS_UTF8 = 0x1, 0x8, 0x800
#: stands where a number has more bits, which are then in the directory
_LARGE = 0xFFFFFFFF


class BadDirectory(ValueError):
    """A zip file contradicts itself, or is not as torch.save writes them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of an entry's bytes.

    Attributes:
        first, last: offsets in the file.
        crc: their checksum, 0 for none.
    """

    first: int
    last: int
    crc: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.last - self.first


def entries(path: Path) -> dict[str, Entry]:
    """The entries by name, without the folder that all are in.

    Every number that stands twice in the file has to be the same, no byte belongs to two entries: so there is only one
    way to read it.

    Raises:
        BadDirectory: the file contradicts itself, an entry is compressed, or a name is there twice.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            file.seek(-_END_BYTES, os.SEEK_END)
            end = file.read()
            if not end.startswith(_END) or archive.comment or end[-2:] != b"\0\0":
                msg = "it does not end with the directory of a zip file"
                raise BadDirectory(msg)
            found = [(info, _entry(file, info)) for info in archive.infolist()]
            _check_apart(found, archive.start_dir)
    except (zipfile.BadZipFile, struct.error, RuntimeError, UnicodeError, OverflowError) as failure:
        msg = f"its directory cannot be read: {failure}"
        raise BadDirectory(msg) from failure
    return _by_name(found)


def _entry(file: BinaryIO, info: zipfile.ZipInfo) -> Entry:
    name = info.orig_filename
    if info.compress_type != zipfile.ZIP_STORED:
        msg = (
            f"its entry {name!r:.80} is compressed, as torch.save never does it; load it with torch.load and save it "
            "again with torch.save"
        )
        raise BadDirectory(msg)
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(START):
        msg = f"its entry {name!r:.80} is not where the directory says"
        raise BadDirectory(msg)
    _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(header)
    said = file.read(name_bytes).decode("utf-8" if flags & _IS_UTF8 else "cp437")
    later = {0} if flags & _HAS_DESCRIPTOR else set()
    sizes = {info.file_size, _LARGE, *later}
    agrees = (
        said == name == info.filename
        and method == info.compress_type
        and (flags | info.flag_bits) & _IS_ENCRYPTED == 0
        and info.compress_size == info.file_size
        and {packed, size} <= sizes
        and crc in {info.CRC, *later}
    )
    if not agrees:
        msg = f"its entry {name!r:.80} and the directory contradict each other"
        raise BadDirectory(msg)
    first = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
    return Entry(first, first + info.file_size, info.CRC)


def _check_apart(found: list[tuple[zipfile.ZipInfo, Entry]], directory: int) -> None:
    extents = sorted((info.header_offset, entry.last) for info, entry in found)
    extents.append((directory, directory))
    for (_, last), (first, _) in pairwise(extents):
        if last > first:
            msg = f"two of its entries, or an entry and the directory, share the bytes {first} to {last}"
            raise BadDirectory(msg)


def _by_name(found: list[tuple[zipfile.ZipInfo, Entry]]) -> dict[str, Entry]:
    folders = {info.filename.partition("/")[0] for info, _ in found}
    named = {info.filename.partition("/")[2]: entry for info, entry in found}
    if len(named) < len(found) or len(folders) != 1:
        msg = f"its {len(found)} entries have {len(named)} names in {len(folders)} folders"
        raise BadDirectory(msg)
    return named
