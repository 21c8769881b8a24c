"""Packs the environment of this Python into one file that can be unpacked anywhere; made once, reused while it holds.

The archive is an uncompressed tar file: reading and writing 1.6 GB takes less than inflating them (docs/hpc/staging.md
has the figures). Order, dates and modes are those of the environment alone, so that equal environments give equal
archives; missing bytecode is compiled, so that no rank does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import marshal
import os
import platform
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import IO

from mpispeed.base.errors import StagingError
from mpispeed.base.plain import read_plain
from mpispeed.base.version import VERSION
from mpispeed.staging.archive import FORMAT, PLACEHOLDER, Seal
from mpispeed.staging.contents import Contents, File, Paths, find_contents, is_left_out, own_paths

MANIFEST = "mpispeed-manifest.txt"
INSIDE = "staged-archive"
"""Folder of an environment for its archive."""

_BLOCK = 512
_PIECE_BYTES = 4 << 20
WAIT_SECONDS = 1800.0
"""Time for another packer of the same environment."""

_MOST_FACTS_BYTES = 1 << 20
_HOUR_SECONDS, _OLD_SECONDS = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive and what a launcher has to know of it.

    Attributes:
        path: the file.
        seal: of its manifest, as text.
        key: of the environment it was made from.
        python: the interpreter, relative to the folder it is unpacked to.
        libraries: folder for LD_LIBRARY_PATH likewise, or empty.
        size: bytes of the file.
        room: bytes that it takes on a disk, in blocks of 4 KiB.
        inodes: files and folders.
        files: files.
        source: the prefix of the environment.
        exclude: patterns of paths that were left out.
    """

    path: Path
    seal: str
    key: str
    python: str
    libraries: str
    size: int
    room: int
    inodes: int
    files: int
    source: str
    exclude: tuple[str, ...] = ()


def default_folder() -> Path:
    """Folder for the archive of this environment: inside of it, or in the user's cache where it cannot be written."""
    prefix = Path(sys.prefix)
    if os.access(prefix, os.W_OK):
        return prefix / INSIDE
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mpispeed" / f"environment-{hashlib.sha256(os.fsencode(prefix)).hexdigest()[:12]}"


def pack(output: Path | None = None, *, again: bool = False, exclude: Sequence[str] | None = None) -> Archive:
    """Pack the environment of this Python, unless an archive of it as it is now is there.

    One that whoever installed the environment has packed inside of it is for all who use it.

    Args:
        output: folder for the archive; by default the one of `default_folder`.
        again: pack anew in any case.
        exclude: patterns of paths in the archive to leave out; None for those of the archive that is there.

    Raises:
        StagingError: the environment cannot be read, or the archive not be written.
    """
    folder = output or default_folder()
    installed = _installed(exclude) if output is None and not again else None
    if installed is not None:
        return installed
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"the folder {folder} of the archive cannot be made: {error.strerror}; give another one with --output"
        raise StagingError(msg) from error
    if folder != Path(sys.prefix) / INSIDE:
        _require_trusted(folder)
    paths = own_paths()
    with _only_packer(folder):
        known = find_packed(folder)
        if exclude is None:
            exclude = known.exclude if known else ()
        if known is not None and not again and known.key == key_of(paths, exclude):
            _mark_used(known.path)
            return known
        return _pack(folder, paths, exclude)


def _installed(exclude: Sequence[str] | None) -> Archive | None:
    """The archive inside of an environment that this user cannot write, if it is that of the environment as it is."""
    prefix = Path(sys.prefix)
    known = None if os.access(prefix, os.W_OK) else find_packed(prefix / INSIDE)
    if known is None or not os.access(known.path, os.R_OK):
        return None
    wanted = known.exclude if exclude is None else exclude
    return known if known.key == key_of(own_paths(), wanted) else None


def _require_trusted(folder: Path) -> None:
    """Refuse a folder where others could put an archive of theirs for us to start from.

    Raises:
        StagingError: it belongs to another user, or everybody can write there.
    """
    status = folder.stat()
    if status.st_uid in _trusted() and not status.st_mode & 0o002:
        return
    msg = (
        f"the folder {folder} belongs to user {status.st_uid} (mode {status.st_mode & 0o7777:o}), and others could put "
        "an archive of theirs there; give a folder of your own with --output"
    )
    raise StagingError(msg)


def find_packed(folder: Path) -> Archive | None:
    """The archive in a folder; None if there is none, or one of another version or of a user that we do not trust.

    Whoever can write the folder may put one there; it has to be ours, or of the owner of the environment, or of root.
    """
    try:
        path = folder / "archive.json"
        if path.lstat().st_uid not in _trusted():
            return None
        facts = json.loads(read_plain(path, _MOST_FACTS_BYTES))
        if facts.pop("format") != FORMAT:
            return None
        found = Archive(folder / facts.pop("path"), **{**facts, "exclude": tuple(facts["exclude"])})
        return found if found.path.stat().st_size == found.size else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _trusted() -> tuple[int, ...]:
    """Users who could change the environment anyway."""
    return 0, os.geteuid(), Path(sys.prefix).stat().st_uid


def _mark_used(path: Path) -> None:
    """Set the date of an archive once an hour, so that nobody who packs anew removes it on its way to nodes."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _HOUR_SECONDS:
            os.utime(path)


def key_of(paths: Paths, exclude: Sequence[str] = ()) -> str:
    """A digest that changes with the environment: by lists of installed files, and dates of what is edited by hand.

    Packages of wheels change with their RECORD; whoever edits one in place has to pack again himself.

    Raises:
        StagingError: a folder of the environment cannot be read.
    """
    try:
        return _key_of(paths, exclude)
    except OSError as error:
        msg = f"the environment cannot be read: {error}; mend or remove what is broken there"
        raise StagingError(msg) from None


def _key_of(paths: Paths, exclude: Sequence[str]) -> str:
    digest = hashlib.sha256()

    def note(*words: object) -> None:
        digest.update(repr(words).encode(errors="surrogateescape") + b"\n")

    note(FORMAT, VERSION, sys.version, str(paths.prefix), str(paths.base), sorted(exclude))
    for folder in (*paths.sites, paths.prefix / "bin"):
        is_own = folder.is_relative_to(paths.prefix) or folder.is_relative_to(paths.base)
        note(str(folder))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name == "__pycache__":
                continue
            if not entry.is_dir():
                note(entry.name, *_dates(entry.path))
            elif is_left_out(entry.path):
                continue
            elif is_own:
                record = f"{entry.path}/RECORD"
                note(entry.name, *(_dates(record) if entry.name.endswith(".dist-info") else ()))
            else:
                _note_tree(note, entry.path)
    for mapped in paths.mapped:
        _note_tree(note, str(mapped))
    note(*_dates(os.path.realpath(sys.executable)), *_dates(str(paths.prefix / "pyvenv.cfg")))
    return digest.hexdigest()


def _note_tree(note: Callable[..., None], top: str) -> None:
    """Note the dates of all files of a folder, or of a file, but not of bytecode."""
    note(top, *_dates(top))
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not is_left_out(f"{folder}/{name}"))
        for name in sorted(files):
            note(folder, name, *_dates(f"{folder}/{name}"))


def _dates(path: str) -> tuple[int, int]:
    """(date of change in ns, size) of a file; zeros if there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@contextlib.contextmanager
def _only_packer(folder: Path) -> Iterator[None]:
    """Wait for another packer of the same environment, whose archive will do.

    Raises:
        StagingError: the other one does not end, or something else has the name of the lock.
    """
    path, until = folder / "lock", time.monotonic() + WAIT_SECONDS
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        msg = f"the lock {path} of the archive cannot be opened: {error.strerror}; give another folder with --output"
        raise StagingError(msg) from error
    with os.fdopen(handle, "rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    msg = (
                        f"another process has been packing this environment for {WAIT_SECONDS / 60:.0f} minutes and "
                        f"holds {path}; end it, or give another folder with --output"
                    )
                    raise StagingError(msg) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks: the last one renames its archive over others
                break
            else:
                break
        yield


def _pack(folder: Path, paths: Paths, exclude: Sequence[str]) -> Archive:
    key = key_of(paths, exclude)  # before the files are read: what changes meanwhile is packed again next time
    contents = find_contents(paths, (f"{paths.home}/{INSIDE}/*", *exclude))
    partial = folder / f"partial-{platform.node()}-{os.getpid()}.tar"
    try:
        partial.unlink(missing_ok=True)  # of a process of the same number that was killed
        with partial.open("xb") as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & (0o600 | _readers_of(contents)))
            seal, facts = write_archive(file, contents)
        path = folder / f"environment-{seal.sha256[:12]}.tar"
        partial.replace(path)
        archive = Archive(
            path, str(seal), key, contents.python, contents.libraries, path.stat().st_size, source=str(paths.prefix),
            exclude=tuple(exclude), **facts,
        )  # fmt: skip
        text = json.dumps({"format": FORMAT, **asdict(archive), "path": path.name}, indent=1)
        with partial.open("x") as file_of_facts:
            file_of_facts.write(text + "\n")
        partial.replace(folder / "archive.json")
    except OSError as error:
        msg = f"the archive cannot be written to {folder}: {error.strerror}; give another folder with --output"
        raise StagingError(msg) from error
    finally:
        partial.unlink(missing_ok=True)
    _remove_old(folder, path)
    return archive


def _readers_of(contents: Contents) -> int:
    """Permission bits to read for those who can read all files where they are: nobody else is to read the archive."""
    sources = [Path(file.source) for file in contents.files.values() if file.source]
    inner = {source.parent for source in sources}
    readers = 0o044
    try:
        for source in sources:
            readers &= source.stat().st_mode
        for folder in inner.union(*(folder.parents for folder in inner)):
            readers &= (folder.stat().st_mode & 0o011) << 2
    except OSError:  # who packs it will say which one is gone
        return 0
    return readers


def _remove_old(folder: Path, current: Path) -> None:
    """Remove earlier archives; younger ones may be on their way to the nodes of a job."""
    for path in (*folder.glob("environment-*.tar"), *folder.glob("partial-*")):
        with contextlib.suppress(OSError):
            if path != current and time.time() - path.stat().st_mtime > _OLD_SECONDS:
                path.unlink()


def write_archive(file: IO[bytes], contents: Contents) -> tuple[Seal, dict[str, int]]:
    """Write all files and the manifest; return its seal, and facts on room."""
    lines = []
    room = 0
    offset = 0
    for entry in with_bytecode(contents):
        with _opened(entry) as (source, size, mtime):
            header = tarfile.TarInfo(entry.path)
            header.size, header.mtime, header.mode = size, mtime, 0o755 if entry.is_executable else 0o644
            head = header.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
            file.write(head)
            offset += len(head)
            digest = _copy(source, file, size, entry.path)
        # Bytecode of our own modules has the word as a constant, whose length counts.
        names_folder = entry.text is not None and PLACEHOLDER in entry.text and not entry.path.endswith(".pyc")
        kind = "t" if names_folder else "f"
        lines.append(f"{kind} {header.mode:o} {mtime} {size} {offset} {digest} {entry.path}")
        offset += _pad(file, size)
        room += -(-size // 4096) * 4096
    folders = folders_of(line.split(" ", 6)[6] for line in lines)
    facts = {"format": FORMAT, "python": contents.python, "libraries": contents.libraries}
    text = "\n".join([json.dumps(facts, sort_keys=True), *(f"d {name}" for name in folders), *lines]) + "\n"
    raw = text.encode(errors="surrogateescape")
    header = tarfile.TarInfo(MANIFEST)
    header.size = len(raw)
    file.write(header.tobuf(tarfile.GNU_FORMAT))
    offset += _BLOCK
    file.write(raw)
    _pad(file, len(raw))
    file.write(bytes(2 * _BLOCK))
    seal = Seal(offset, len(raw), hashlib.sha256(raw).hexdigest())
    return seal, {"room": room + 4096 * len(folders), "inodes": len(lines) + len(folders) + 2, "files": len(lines)}


def folders_of(paths: Iterable[str]) -> list[str]:
    """All folders of the paths, each after the one it is in."""
    found: set[str] = set()
    for path in paths:
        name = path.rpartition("/")[0]
        while name and name not in found:
            found.add(name)
            name = name.rpartition("/")[0]
    return sorted(found)


@contextlib.contextmanager
def _opened(entry: File) -> Iterator[tuple[IO[bytes], int, int]]:
    """A file's data, size and date."""
    if "\n" in entry.path:
        msg = f"{entry.source or entry.path!r} has a line break in its name, which an archive cannot hold; rename it"
        raise StagingError(msg)
    if entry.text is not None:
        yield io.BytesIO(entry.text), len(entry.text), entry.mtime
        return
    try:
        opened = Path(entry.source).open("rb")  # noqa: SIM115 - what fails behind it is no failure to open
    except OSError as error:
        msg = f"{entry.source} cannot be packed: {error.strerror}; mend it, or leave it out with --exclude"
        raise StagingError(msg) from None
    with opened as source:
        status = os.fstat(source.fileno())
        yield source, status.st_size, max(0, int(status.st_mtime))


def _copy(source: IO[bytes], target: IO[bytes], size: int, name: str) -> str:
    """Copy `size` bytes; return their SHA-256.

    Raises:
        StagingError: the file became shorter meanwhile.
    """
    digest = hashlib.sha256()
    left = size
    while left:
        piece = source.read(min(left, _PIECE_BYTES))
        if not piece:
            msg = f"{name} was changed while it was packed; pack again when nobody installs into the environment"
            raise StagingError(msg)
        digest.update(piece)
        target.write(piece)
        left -= len(piece)
    return digest.hexdigest()


def _pad(file: IO[bytes], size: int) -> int:
    """Fill the last block of a member; return the bytes of all of its blocks."""
    rest = -size % _BLOCK
    file.write(bytes(rest))
    return size + rest


def with_bytecode(contents: Contents) -> list[File]:
    """All files in order, with bytecode for every module that has none which is valid."""
    files = dict(contents.files)
    for file in contents.files.values():
        if not file.path.endswith(".py") or "/bin/" in file.path:
            continue
        folder, _, name = file.path.rpartition("/")
        path = f"{folder}/__pycache__/{name[:-3]}.{sys.implementation.cache_tag}.pyc"
        with _opened(file) as (source, size, mtime):
            head = importlib.util.MAGIC_NUMBER + b"".join(
                (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, mtime, size)
            )
            known = files.get(path)
            if known is not None and known.source and _starts_with(known.source, head):
                continue
            code = _compiled(source.read(), file.source or file.path)
        files.pop(path, None)
        if code is not None:
            files[path] = File(path, text=head + marshal.dumps(code))
    return [files[path] for path in sorted(files)]


def _starts_with(path: str, head: bytes) -> bool:
    with Path(path).open("rb") as file:
        return file.read(len(head)) == head


def _compiled(text: bytes, path: str) -> CodeType | None:
    """Code of a module; None for what is none, such as templates and files of other versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compile(text, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
