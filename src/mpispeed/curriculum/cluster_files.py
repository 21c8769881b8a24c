"""Files of clusters of samples, each made once and used by all ranks and by later runs.

A cluster is `cluster-KEY.bin`, its sample numbers in ascending order (u4 or u8, little endian), and `cluster-KEY.json`,
which tells of what it is made and what its checksum is, and is written last. KEY is a digest of what it is made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpispeed.curriculum.difficulty_index import PIECE, Numbers
from mpispeed.curriculum.index_file import IndexFileError
from mpispeed.native.checksum import crc32c

Make = Callable[[], npt.NDArray[np.bool_]]
"""Makes a cluster: True for each sample of the data set that is in it."""

_VERSION = 1
_MOST_OPEN = 32
_PART = ".cluster-part-"
_ATTEMPTS = 3
_LEFT_SECONDS = 24 * 3600.0
"""Age from which a part that nobody has written to is one of a killed process. Locks may not be seen on other nodes."""


class ClusterFiles:
    """The clusters in a folder. Ranks that share the folder make each cluster once; it is checked before it is used.

    Who comes first makes a file, under a lock of the system that ends with its process; the others wait for it. Where a
    file system has no locks, each makes its own, and the last one stays, with the same bytes.
    """

    def __init__(self, folder: str | Path) -> None:
        """Take a folder, which is made if it is missing.

        Raises:
            IndexFileError: it cannot be made, or cannot be written.
        """
        self.folder = Path(folder)
        self._open: OrderedDict[str, _Cluster] = OrderedDict()  # those used last
        self._checked: set[str] = set()
        self._turn = threading.Lock()  # batches may be read ahead by a thread
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as failure:
            raise IndexFileError(_cannot("write into", self.folder, failure)) from failure

    def count(self, facts: Mapping[str, Any], make: Make) -> int:
        """Number of samples of a cluster.

        Args:
            facts: what the cluster is made of, as plain values; with the number of `samples` of the data set.
            make: makes it if there is no file of it.

        Raises:
            IndexFileError: the file cannot be written, read, or made.
        """
        return self._cluster(facts, make).count

    def take(self, facts: Mapping[str, Any], make: Make, places: Numbers) -> Numbers:
        """Samples of a cluster at `places` [n]; the rest as `count`."""
        return self._cluster(facts, make).take(places)

    def _cluster(self, facts: Mapping[str, Any], make: Make) -> _Cluster:
        key = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()
        with self._turn:
            if key not in self._open:
                seen = self._stamp(key)
                self._open[key] = self._opened(key, facts) or self._made(key, facts, make, seen)
                if len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)  # closed when nobody reads it any more
            self._open.move_to_end(key)
            return self._open[key]

    def _opened(self, key: str, facts: Mapping[str, Any]) -> _Cluster | None:
        """A cluster whose files are there and whole, or None."""
        try:
            told = json.loads(self._path(key, "json").read_bytes())
            if told["version"] != _VERSION or told["of"] != json.loads(json.dumps(facts)):
                return None
            found = _Cluster(self._path(key, "bin"), int(told["count"]), int(facts["samples"]))
            if key not in self._checked and found.checksum() != told["crc32c"]:
                found.close()
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self._checked.add(key)
        return found

    def _made(self, key: str, facts: Mapping[str, Any], make: Make, seen: tuple[int, int] | None) -> _Cluster:
        """Make a cluster, if nobody has since its files with the stamp `seen` were found missing or damaged."""
        for _ in range(_ATTEMPTS):
            try:
                with self._locked():
                    if self._stamp(key) == seen:
                        self._write(key, facts, make())
            except OSError as failure:
                raise IndexFileError(_cannot("write into", self.folder, failure)) from failure
            # Without the lock: all who have waited for it read the file at the same time.
            seen = self._stamp(key)
            found = self._opened(key, facts)
            if found is not None:
                return found
        msg = f"{self._path(key, 'bin')} was written and cannot be read back whole; look at its file system"
        raise IndexFileError(msg)

    def _stamp(self, key: str) -> tuple[int, int] | None:
        """Which file tells of a cluster, another one after it was made again; None if there is none."""
        try:
            status = self._path(key, "json").stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _write(self, key: str, facts: Mapping[str, Any], mask: npt.NDArray[np.bool_]) -> None:
        dtype, checksum, count = _dtype_of(len(mask)), 0, 0
        with _placing(self._path(key, "bin")) as file:
            for start in range(0, len(mask), PIECE):
                piece = (np.flatnonzero(mask[start : start + PIECE]) + start).astype(dtype)
                file.write(piece.tobytes())
                checksum, count = crc32c(piece.tobytes(), checksum), count + len(piece)
        told = {"version": _VERSION, "of": facts, "count": count, "crc32c": checksum}
        with _placing(self._path(key, "json")) as file:
            file.write(json.dumps(told, indent=1).encode())

    def _path(self, key: str, ending: str) -> Path:
        return self.folder / f"cluster-{key}.{ending}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Context in which no other process of this folder is, if its file system has locks."""
        with (self.folder / ".lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                yield
                return
            try:
                self._remove_left_parts()
                yield
            finally:
                # Not by closing: a process that was forked meanwhile, by another thread, has the file open, too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _remove_left_parts(self) -> None:
        for part in self.folder.glob(f"{_PART}*"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_SECONDS:
                    part.unlink()


class _Cluster:
    """The open file of a cluster."""

    def __init__(self, path: Path, count: int, samples: int) -> None:
        self._path, self.count, self._samples, self._dtype = path, count, samples, _dtype_of(samples)
        self._handle = -1
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(self._handle).st_size != count * self._dtype.itemsize:
            self.close()
            msg = f"{path} does not have {count} samples"
            raise ValueError(msg)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.close()

    def checksum(self) -> int:
        """Of the whole file."""
        found, size = 0, self._dtype.itemsize
        for start in range(0, self.count, PIECE):
            found = crc32c(os.pread(self._handle, PIECE * size, start * size), found)
        return found

    def take(self, places: Numbers) -> Numbers:
        """Samples at places [n]."""
        size = self._dtype.itemsize
        raw = b"".join(os.pread(self._handle, size, place * size) for place in places.tolist())
        found = np.frombuffer(raw, self._dtype).astype(np.int64) if len(raw) == len(places) * size else None
        if found is None or (found >= self._samples).any():
            msg = f"{self._path} was changed while it was in use; remove it, it is made again"
            raise IndexFileError(msg)
        return found


def _dtype_of(samples: int) -> np.dtype[Any]:
    return np.dtype("<u4" if samples <= 1 << 32 else "<u8")


@contextmanager
def _placing(path: Path) -> Iterator[Any]:
    """Context of a new file, which appears at `path` complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_PART)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        part.chmod(0o644)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _cannot(what: str, folder: Path, failure: OSError) -> str:
    return f"cannot {what} {folder}: {failure.strerror or failure}"
