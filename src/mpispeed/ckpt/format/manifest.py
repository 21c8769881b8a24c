"""manifest.json, the last file of a save; a tag without a complete and matching one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.errors import CheckpointError
from mpispeed.base.files import sync_folder
from mpispeed.base.plain import read_head, read_plain
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint

#: a manifest takes some thirty bytes per tensor; what is larger than this is no manifest and is not read
_MOST_MAJOR = 1000
_MANIFEST_BYTES = 64 << 20
#: of one file; some thousand bytes per tensor. Files of holes may seem to be of any size
_INDEX_BYTES = 16 << 30
#: nesting of the layout, which listings show
_LAYOUT_DEPTH = 50
#: what stands before the layout is shorter
_HEAD_BYTES = 4 << 10
_SERIAL = re.compile(rb'^ "serial": ([0-9]{1,18}),$', re.MULTILINE)
_MOST_SERIAL = 10**18 - 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of a file of a checkpoint.

    Attributes:
        bytes: its size.
        crc32c: checksum of all its bytes.
        index_extents: (start, length) of the ranges that hold no elements: HDF5's own metadata and the
            checksums of the elements.
        index_crc32c: checksum of those ranges in order; lets a reader trust names and offsets without
            reading elements.

    Units:
        bytes
    """

    bytes: int
    crc32c: int
    index_extents: tuple[tuple[int, int], ...] = ()
    index_crc32c: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of manifest.json.

    Attributes:
        serial: one more than the highest in the folder when the save began; orders saves independently of clocks.
        created: time when the save began, by the clock of rank 0.
    """

    tag: str
    global_step: int
    serial: int
    uuid: str
    created: str
    layout: dict[str, Any]
    files: dict[str, FileRecord]
    version: tuple[int, int] = schema.VERSION

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key of the checkpoints of a folder in the order of their saves.

        Serials of copies from elsewhere, and of jobs that saved at the same time, may be equal.
        """
        return self.serial, self.global_step, self.created

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())

    @property
    def data_files(self) -> list[str]:
        """Names of the files that hold elements besides model.h5, in order."""
        return sorted(filter(schema.is_data_file, self.files))


def write(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json under another name, then move it in place; both reach the disk.

    Raises:
        CheckpointError: it would be larger than what is read.
        OSError: the file system refuses.
    """
    text = signed({"format": schema.FORMAT, **asdict(manifest), "complete": True})
    if len(text) > _MANIFEST_BYTES:
        msg = f"the manifest of {manifest.tag!r} would have {len(text)} bytes, the limit is {_MANIFEST_BYTES}"
        raise CheckpointError(msg)
    write_text(folder, text)


def write_text(folder: Path, text: str) -> None:
    """As `write`, with the text of a manifest.

    Raises:
        OSError: the file system refuses.
    """
    temporary = folder / f"{schema.MANIFEST_FILE}.tmp"
    write_durably(temporary, text)
    temporary.rename(folder / schema.MANIFEST_FILE)
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """Read and check manifest.json.

    Raises:
        IncompleteCheckpoint: there is none, or it does not say that the save completed.
        CorruptCheckpoint: it is not what was written, or of another format.
        CheckpointError: it may not be read, or is of a newer major version.
    """
    path = folder / schema.MANIFEST_FILE
    try:
        raw = read_plain(path, _MANIFEST_BYTES)
        content = json.loads(raw)
    except FileNotFoundError:
        msg = f"{folder} has no {schema.MANIFEST_FILE}: the save that made it never finished; load another tag"
        raise IncompleteCheckpoint(msg) from None
    except PermissionError as failure:
        msg = f"{path} cannot be read: {failure.strerror}"
        raise CheckpointError(msg) from failure
    except (OSError, ValueError, RecursionError) as failure:
        msg = f"{path} is damaged: {failure}"
        raise CorruptCheckpoint(msg) from failure
    if not isinstance(content, dict) or content.get("format") != schema.FORMAT:
        msg = f"{path} is not the manifest of a {schema.FORMAT}"
        raise CorruptCheckpoint(msg)
    try:
        _check_digest(path, content, raw)
    except CorruptCheckpoint:
        _refuse_newer(path, content)  # whose digest may be another
        raise
    if not content.pop("complete", False):
        msg = f"{path} says that the save never finished; load another tag"
        raise IncompleteCheckpoint(msg)
    try:
        major, minor = (_natural(part) for part in content["version"])
    except (KeyError, TypeError, ValueError) as failure:
        msg = f"{path} has no valid version: {failure}"
        raise CorruptCheckpoint(msg) from failure
    schema.check_version((major, minor), str(path))
    return _from_content(path, content, (major, minor))


def _refuse_newer(path: Path, content: dict[str, Any]) -> None:
    """Raise CheckpointError for a manifest that says that it is of a newer major version."""
    version = content.get("version")
    major = version[0] if isinstance(version, list) and len(version) == 2 else 0
    if type(major) is int and schema.VERSION[0] < major < _MOST_MAJOR:
        schema.check_version((major, 0), str(path))


def serial_of(folder: Path) -> int:
    """The serial that a manifest begins with, without reading the rest of it; 0 if there is none."""
    try:
        found = _SERIAL.search(read_head(folder / schema.MANIFEST_FILE, _HEAD_BYTES))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def next_serial(last: int) -> int:
    """The serial of a save after one of serial `last`."""
    return min(last + 1, _MOST_SERIAL)


def signed(content: dict[str, Any]) -> str:
    """The text of a manifest with its digest; one content has one text, so that every byte of it is checked."""
    content = {key: value for key, value in content.items() if key != "digest"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items()]
    digest = hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
    return f'{{\n{"".join(lines)} "digest": "blake2b:{digest}"\n}}\n'


def _check_digest(path: Path, content: dict[str, Any], raw: bytes) -> None:
    try:
        is_whole = signed(content).encode() == raw
    except (RecursionError, UnicodeEncodeError) as failure:
        msg = f"{path} is damaged: {failure}"
        raise CorruptCheckpoint(msg) from failure
    if not is_whole:
        msg = f"{path} is damaged: its content does not match its digest"
        raise CorruptCheckpoint(msg)


def _from_content(path: Path, content: dict[str, Any], version: tuple[int, int]) -> Manifest:
    try:
        files = {name: _record(name, record) for name, record in _typed(content, "files", dict).items()}
        return Manifest(
            tag=_text(content, "tag"),
            global_step=_natural(content["global_step"]),
            serial=_natural(content["serial"]),
            uuid=_text(content, "uuid"),
            created=_text(content, "created"),
            layout=_shallow(_typed(content, "layout", dict)),
            files=files,
            version=version,
        )
    except (KeyError, TypeError, ValueError) as failure:
        msg = f"{path} lacks what format {version[0]}.{version[1]} requires: {failure}"
        raise CorruptCheckpoint(msg) from failure


def _record(name: str, record: dict[str, Any]) -> FileRecord:
    is_name = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not is_name and not schema.is_data_file(name):
        msg = f"{name!r:.80} is no name of a file in the folder of the tag"
        raise ValueError(msg)
    size = _natural(record["bytes"])
    extents = tuple((_natural(start), _natural(length)) for start, length in record["index_extents"])
    end = -1
    for start, length in extents:
        # no byte is read twice and none beyond the file, whatever the extents say
        if start <= end or length == 0 or start + length > size:
            msg = f"index_extents of {name} leave the file of {size} bytes, overlap, or are not in order"
            raise ValueError(msg)
        end = start + length
    if sum(length for _, length in extents) > _INDEX_BYTES:
        msg = f"index_extents of {name} are more than {_INDEX_BYTES} bytes"
        raise ValueError(msg)
    return FileRecord(size, _natural(record["crc32c"]), extents, _natural(record["index_crc32c"]))


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        msg = f"{value!r:.80} is no size, version, step or checksum"
        raise ValueError(msg)
    return value


def _typed(content: dict[str, Any], name: str, kind: type) -> Any:
    value = content[name]
    if type(value) is not kind:
        msg = f"{name} has to be of type {kind.__name__} and is {value!r:.80}"
        raise TypeError(msg)
    return value


def _text(content: dict[str, Any], name: str) -> str:
    value: str = _typed(content, name, str)
    if not value.isprintable():
        msg = f"{name} has characters that cannot be shown: {value!r:.80}"
        raise ValueError(msg)
    return value


def _shallow(layout: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [layout]
    for _ in range(_LAYOUT_DEPTH):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in inner for item in part if isinstance(item, (dict, list))]
        if not level:
            return layout
    msg = f"layout is nested more than {_LAYOUT_DEPTH} levels deep"
    raise ValueError(msg)


def strangeness(manifest: Manifest, tag: str, global_step: int) -> Iterator[str]:
    """Contradictions between the manifest and the tag and step that a file names: it is of another checkpoint.

    The folder's name does not count: a copy of it under another name is the same checkpoint.
    """
    for what, own, other in (("tag", tag, manifest.tag), ("step", global_step, manifest.global_step)):
        if own != other:
            yield f"its {what} is {own!r:.80}, the manifest's {other!r:.80}"


def check_belongs(path: Path, manifest: Manifest, tag: str, global_step: int) -> None:
    """Check that the file `path`, which names this tag and step, belongs to the manifest's checkpoint.

    Raises:
        CorruptCheckpoint: it is of another one.
    """
    found = ", ".join(strangeness(manifest, tag, global_step))
    if found:
        msg = f"{path} belongs to another checkpoint: {found}; put back the file that was saved, or load another tag"
        raise CorruptCheckpoint(msg)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file of the checkpoint exists in its full size.

    Raises:
        CorruptCheckpoint: names the first file that is not.
    """
    data = folder / schema.DATA_FOLDER
    if any(map(schema.is_data_file, manifest.files)) and (data.is_symlink() or not data.is_dir()):
        msg = f"{data} is missing or no ordinary folder: the checkpoint {manifest.tag!r} is not usable"
        raise CorruptCheckpoint(msg)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            msg = f"{path} is missing: the checkpoint {manifest.tag!r} is not usable"
            raise CorruptCheckpoint(msg) from None
        except OSError as failure:
            msg = f"{path} cannot be looked at: {failure.strerror}"
            raise CorruptCheckpoint(msg) from failure
        if not stat.S_ISREG(status.st_mode):
            msg = f"{path} is no ordinary file"
            raise CorruptCheckpoint(msg)
        found = status.st_size
        if found != record.bytes:
            what = "truncated" if found < record.bytes else "longer than it was"
            msg = f"{path} is {what}: {found} bytes, saved were {record.bytes}"
            raise CorruptCheckpoint(msg)


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that others wrote is on the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
