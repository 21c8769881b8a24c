"""Copies of the files of a data set on the disks of the nodes, made by one rank of each, for the time of a run.

    root/mpispeed-data-USERID/RUN.rankN/owner.json, 0.h5, 1.bin, 1.idx ...

A data set can be copied if `files()` says which files it reads, and `reopened(paths)` opens it over others.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpispeed.base.errors import ConfigError, MpispeedError
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.native.block_file import reserve
from mpispeed.native.checksum import crc32c
from mpispeed.store import private_folder
from mpispeed.store.mounts import UNKNOWN, Mount, free_bytes, mount_of
from mpispeed.store.owner import make_folder
from mpispeed.store.private_folder import Kind, PrivateFolder, run_name

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

KEY = "data_loader.copy_to"
COPIED = Kind("copied data", KEY, "mpispeed-data", re.compile(r"[0-9]{1,7}(\.[A-Za-z0-9]{1,16})?(\.part)?"))
BLOCK = 8 << 20
THREADS = 4
"""Blocks that a node reads at once: one reader alone does not fill the line to a parallel file system."""
MARGIN_PERCENT = 1
MEET_SECONDS = 5.0
"""How often copying ranks meet the others, which wait no longer than that: a wait is not taken for a hang."""
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,16}")


class Copyable(Protocol):
    """A data set that can be read from copies of its files."""

    def files(self) -> Sequence[str | os.PathLike[str]]:
        """The files that it reads."""

    def reopened(self, paths: Mapping[str, str]) -> Any:
        """The same data set over copies: `paths` gives the copy of each file, by the text of what `files` gave.

        Local: called on every rank when all copies are complete.
        """


class Copies:
    """Copies on this node.

    Attributes:
        paths: of the copies, by the texts of the files' paths.
    """

    def __init__(self, paths: Mapping[str, str], folder: PrivateFolder | None) -> None:
        self.paths, self._folder = paths, folder

    def close(self) -> None:
        """Remove the copies, on the rank that made them; open files can be read on."""
        if self._folder is not None:
            self._folder.remove()


@dataclass(frozen=True, slots=True)
class _Facts:
    """A node before anything is copied."""

    host: str
    problem: str = ""
    nbytes: int = 0
    free: int = 0
    root: str = ""
    mount: Mount = UNKNOWN


def require_copyable(dataset: Any) -> None:
    """Refuse a data set that cannot be copied.

    Raises:
        ConfigError: it does not say what it reads.
    """
    if not (callable(getattr(dataset, "files", None)) and callable(getattr(dataset, "reopened", None))):
        msg = (
            f"{KEY}: a {type(dataset).__name__} does not say which files it reads; give the data set the methods "
            "files() and reopened(paths), or leave the key out"
        )
        raise ConfigError(msg)


def copy_to_nodes(dataset: Any, root: str, node: Comm, world: Comm) -> tuple[Any, Copies]:
    """Copy the files of a data set to this node's disk, once for all its ranks; returns the data set over the copies.

    Copies of killed runs are removed first. Space is looked for before anything is copied; copies are compared with
    what was read of the files, and are in place when they are complete.

    Args:
        dataset: `Copyable`; ranks of a node may have different ones, whose files are all copied, or None.
        root: a folder, with $VARIABLES of the node; made if it is missing.
        node: the ranks of this node.
        world: all ranks.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if the data set cannot be copied, a file cannot be read, the disk is too small or
            does not take the copies, or the data set cannot be opened over them.
    """
    with world.together(ConfigError):
        mine = _files_of(dataset)
    if not any(world.gather_objects(dataset is not None)):
        return dataset, Copies({}, None)
    wanted = list(dict.fromkeys(chain.from_iterable(node.gather_objects(mine))))
    sizes: dict[str, os.stat_result] = {}
    facts = _look(wanted, root, sizes) if node.rank == 0 else None
    _require_room([found for found in world.gather_objects(facts) if found is not None])
    run = world.share(run_name() if world.rank == 0 else "")
    begin, copies = time.monotonic(), _copy_all(sizes, facts, run, world)
    paths = node.share(copies.paths)
    try:
        with world.together(ConfigError, doing="the copies of the data cannot be opened"):
            opened = None if dataset is None else dataset.reopened(paths)
    except ConfigError:
        copies.close()
        raise
    if world.rank == 0 and facts is not None:
        log.info(
            "data: %d files (%s) copied to %s on each node in %s",
            len(wanted), format_bytes(facts.nbytes), facts.root, format_duration(time.monotonic() - begin),
        )  # fmt: skip
    return opened, Copies(paths, copies._folder)


def _files_of(dataset: Any) -> list[str]:
    if dataset is None:
        return []
    require_copyable(dataset)
    return [str(os.fspath(path)) for path in dataset.files()]


def _look(files: Sequence[str], root: str, sizes: dict[str, os.stat_result]) -> _Facts:
    """State of this node; raises nothing, because the other ranks wait for it. `sizes` is filled."""
    host = socket.gethostname()
    place = os.path.expandvars(root)
    if "$" in place:
        return _Facts(host, f"{root!r} has a variable that is not set there")
    try:
        for file in files:
            status = Path(file).stat()
            if not stat.S_ISREG(status.st_mode):
                return _Facts(host, f"{file} is no file that can be copied")
            sizes[file] = status
    except OSError as error:
        return _Facts(host, f"{error.filename} cannot be copied: {error.strerror}")
    try:
        folder = Path(place)
        if not folder.exists():
            make_folder(folder)
        private_folder.clean_stale(folder, COPIED)
        total = sum(status.st_size for status in sizes.values())
        return _Facts(host, "", total, free_bytes(folder), str(folder.resolve()), mount_of(folder))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return _Facts(host, f"the folder {place} cannot be used: {reason}")


def _require_room(nodes: Sequence[_Facts]) -> None:
    """Raise alike on all ranks, which have the same facts.

    Raises:
        ConfigError: with everything that is wrong on any node.
    """
    problems = [f"{node.host}: {node.problem}" for node in nodes if node.problem]
    sharing: dict[object, list[_Facts]] = {}
    for number, node in enumerate(nodes):
        if not node.problem:
            sharing.setdefault(node.mount.source if node.mount.is_network else number, []).append(node)
    for group in sharing.values():
        total = sum(node.nbytes for node in group)
        total += total * MARGIN_PERCENT // 100
        free = min(node.free for node in group)
        if total > free:
            hosts = ", ".join(node.host for node in group)
            problems.append(
                f"{hosts}: copies in {group[0].root} need {format_bytes(total)} ({total} bytes), {MARGIN_PERCENT} % to "
                f"spare included, and {format_bytes(free)} ({free} bytes) are free"
            )
    if problems:
        msg = "; ".join([f"{KEY}: the data cannot be copied", *problems, "name another folder, or leave the key out"])
        raise ConfigError(msg)


def _copy_all(sizes: Mapping[str, os.stat_result], facts: _Facts | None, run: str, world: Comm) -> Copies:
    """Copy on the nodes' first ranks; the others meet them from time to time.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a node cannot copy.
    """
    copying = _Copying(sizes, facts, run, world.rank) if facts is not None else None
    if copying is not None and world.rank == 0 and copying.is_slow_place:
        log.warning("%s is on a network file system: copies there save the nodes nothing", KEY)
    while True:
        told = "" if copying is None else copying.go_on(MEET_SECONDS)
        texts: list[str] = world.gather_objects(told)
        failed = [text for text in texts if text not in ("", _Copying.MORE)]
        if failed:
            if copying is not None:
                copying.give_up()
            msg = f"{KEY}: {failed[0]}"
            raise ConfigError(msg)
        if not any(texts):
            return Copies({}, None) if copying is None else copying.copies()


class _Copying:
    """The copying of one node."""

    MORE = "more"

    def __init__(self, sizes: Mapping[str, os.stat_result], facts: _Facts, run: str, rank: int) -> None:
        self._sizes, self._facts, self._run, self._rank = sizes, facts, run, rank
        self._folder: PrivateFolder | None = None
        self._paths: dict[str, str] = {}
        self._work = self._blocks()

    @property
    def is_slow_place(self) -> bool:
        """True if the copies cross the network, too."""
        return self._facts.mount.is_network

    def go_on(self, seconds: float) -> str:
        """Copy for some time; returns `MORE`, "" at the end, or what went wrong."""
        end = time.monotonic() + seconds
        try:
            for _ in self._work:
                if time.monotonic() > end:
                    return self.MORE
        except (OSError, MpispeedError) as error:
            return f"{self._facts.host}: {error}"
        except Exception as error:
            log.exception("the copying of data failed")
            return f"{self._facts.host}: {type(error).__name__}: {error}"
        return ""

    def give_up(self) -> None:
        """Remove what is there."""
        self._work.close()
        if self._folder is not None:
            self._folder.remove()

    def copies(self) -> Copies:
        """The copies, when all are complete."""
        return Copies(self._paths, self._folder)

    def _blocks(self) -> Generator[None, None, None]:
        """Copy all files; stops after each block."""
        self._folder = PrivateFolder(Path(self._facts.root), self._run, self._rank, COPIED)
        for (file, status), name in zip(self._sizes.items(), names_of(list(self._sizes)), strict=True):
            part = f"{name}.part"
            self._folder.add(part)
            self._folder.add(name)
            with closing(copy_blocks(file, self._folder.path / part, status)) as blocks:
                yield from blocks
            target = self._folder.path / name
            (self._folder.path / part).rename(target)
            self._paths[file] = str(target)


def names_of(files: Sequence[str]) -> list[str]:
    """Names of copies: a number for each stem of a folder, and the suffix if it is a plain one."""
    numbers: dict[tuple[str, str], int] = {}
    names: list[str] = []
    for file in files:
        path = Path(file)
        suffix = path.suffix if _SUFFIX.fullmatch(path.suffix) else ""
        number = numbers.setdefault((str(path.parent), path.stem), len(numbers))
        if f"{number}{suffix}" in names:
            number = numbers[file, ""] = len(numbers)
        names.append(f"{number}{suffix}")
    return names


def copy_blocks(source: str, target: Path, status: os.stat_result) -> Generator[None, None, None]:
    """Copy a file that has `status`, and compare the copy with what was read; stops after each block.

    Raises:
        ConfigError: the source has changed, or the copy is not what was written.
        OSError: a file cannot be read or written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    starts = range(0, status.st_size, BLOCK)
    inward = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        outward = os.open(target, flags, 0o400)
        try:
            if status.st_size:
                reserve(outward, status.st_size)

            def copied(start: int) -> int:
                data = _read(inward, min(BLOCK, status.st_size - start), start, source)
                _write(outward, data, start)
                os.posix_fadvise(inward, start, len(data), os.POSIX_FADV_DONTNEED)  # the copy is what will be read
                return crc32c(data)

            def is_same(item: tuple[int, int]) -> bool:
                start, checksum = item
                return crc32c(_read(outward, min(BLOCK, status.st_size - start), start, str(target))) == checksum

            with ThreadPoolExecutor(THREADS) as pool:
                checksums = []
                for checksum in _in_turn(pool, copied, starts):
                    checksums.append(checksum)
                    yield
                os.fsync(outward)
                yield
                for start, same in zip(
                    starts, _in_turn(pool, is_same, zip(starts, checksums, strict=True)), strict=True
                ):
                    if not same:
                        msg = f"the copy of {source} is damaged at byte {start}: {target} gave back other bytes"
                        raise ConfigError(msg)
                    yield
        finally:
            os.close(outward)
        now = os.fstat(inward)
        if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            msg = f"{source} was changed while it was copied"
            raise ConfigError(msg)
    finally:
        os.close(inward)


def _in_turn(pool: ThreadPoolExecutor, work: Any, items: Any) -> Iterator[Any]:
    """Results in the order of items, of which a few are worked on at once."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _read(fd: int, count: int, start: int, name: str) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = os.preadv(fd, [view[at:]], start + at)
        if not got:
            msg = f"{name} ends at byte {start + at}, before its length"
            raise ConfigError(msg)
        at += got
    return data


def _write(fd: int, data: bytearray, start: int) -> None:
    view, at = memoryview(data), 0
    while at < len(data):
        at += os.pwrite(fd, view[at:], start + at)
