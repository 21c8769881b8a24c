"""Format and version of an HDF5 file, as the attributes of its root have them. Nothing else of it is read.

All files that this package writes have both. The major number of a version grows when older readers would misread a
file, the minor one when they only miss something.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5f, h5s, h5t

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import printable, read_head
from mpispeed.ckpt.format import hdf5
from mpispeed.ckpt.format.errors import CorruptCheckpoint

FORMAT, VERSION = "format", "version"
_MAGIC = b"\x89HDF\r\n\x1a\n"
_MOST_BYTES = 1024
Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """Format and version of a file, on its own word.

    Attributes:
        form: the attribute `format`; "" if there is none that is a short text.
        version: major and minor number; None if there is none.
    """

    form: str
    version: Version | None


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Context with an HDF5 file that cannot make HDF5 open another one.

    HDF5 gets an open descriptor in place of a path, also for what it would look for elsewhere (sources of virtual
    datasets, targets of external links), and so finds this file only.

    Raises:
        OSError: it cannot be read, is a pipe or a device, or no HDF5 file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            msg = f"{path}: it is no ordinary file"
            raise OSError(msg)
        with hdf5.open_reading(io.FileIO(handle, closefd=False)) as file:
            yield file
    finally:
        os.close(handle)


def kind_of(path: Path) -> Kind:
    """What a file says of itself.

    Raises:
        CorruptCheckpoint: it begins as HDF5 does, and HDF5 cannot make sense of it.
        CheckpointError: it cannot be read, or is no HDF5 file.
    """
    try:
        with opened(path) as file:
            return of_root(file.id)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as failure:
        if path.is_file() and _begins_as_hdf5(path):
            msg = f"{path} is damaged: HDF5 says: {printable(str(failure), 300)}"
            raise CorruptCheckpoint(msg) from failure
        # a failure of the file system has a number; what HDF5 says of other files is long and helps nobody
        known = failure.strerror if isinstance(failure, OSError) else ""
        why = known or ("it is no HDF5 file" if path.is_file() else "it is no ordinary file")
        msg = f"{path} cannot be read as an HDF5 file: {why}"
        raise CheckpointError(msg) from failure


def _begins_as_hdf5(path: Path) -> bool:
    try:
        return read_head(path.resolve(), len(_MAGIC)) == _MAGIC
    except (OSError, RuntimeError):  # the second of links in a circle
        return False


def of_root(root: h5f.FileID) -> Kind:
    """What the root of an open file says; attributes of other types than these two have are as none."""
    form, version = _short(root, FORMAT), _short(root, VERSION)
    text = form.decode(errors="replace") if isinstance(form, bytes) else ""
    return Kind(text, version_of({VERSION: version}))


def version_of(attributes: Mapping[str, Any]) -> Version | None:
    """Major and minor number of the attribute `version`: of two whole numbers, or one, the major; else None."""
    value = np.asarray(attributes.get(VERSION))
    if value.dtype.kind not in "iu" or value.shape not in ((), (1,), (2,)):
        return None
    numbers = [*value.reshape(-1).tolist(), 0]
    return None if min(numbers) < 0 else (numbers[0], numbers[1])


def refusal(found: Version | None, known: Version) -> str:
    """Why a version cannot be read and what to do, to stand behind "PATH is a run record"; "" if it can be."""
    if found is None:
        return "of no version; it is damaged, or something else wrote it"
    if found[0] == known[0]:
        return ""
    age = "newer" if found[0] > known[0] else "older"
    return f"of version {shown(found)}; this mpispeed reads version {shown(known)}; use {_an(age)} one for it"


def warning(found: Version, known: Version) -> str:
    """What is to be said of a version that can be read, as in `refusal`; "" for most."""
    if found <= known:
        return ""
    return f"of version {shown(found)}, newer than {shown(known)}: what that added is ignored"


def shown(version: Version) -> str:
    """A version as text."""
    return f"{version[0]}.{version[1]}"


def _an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _short(root: h5f.FileID, name: str) -> Any:
    """An attribute that is a short text or a few whole numbers; None otherwise."""
    if not h5a.exists(root, name.encode()):
        return None
    own = h5a.open(root, name.encode())
    kind, space = own.get_type(), own.get_space()
    is_fit = not kind.is_variable_str() if isinstance(kind, h5t.TypeStringID) else isinstance(kind, h5t.TypeIntegerID)
    # the number of elements comes from the file, and so does the size of one
    if not is_fit or space.get_simple_extent_type() == h5s.NULL:
        return None
    if space.get_simple_extent_npoints() * kind.get_size() > _MOST_BYTES:
        return None
    dtype = np.dtype(f"S{kind.get_size()}") if isinstance(kind, h5t.TypeStringID) else kind.dtype
    value = np.empty(space.get_simple_extent_dims(), dtype)
    if value.size:
        own.read(value, mtype=kind)
    return value[()] if value.shape == () else value
