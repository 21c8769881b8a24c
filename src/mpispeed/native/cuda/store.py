"""Machine code of the kernels: prebuilt in a folder, or compiled once per node before the first of them runs.

All sources are compiled side by side. The key of a file is a hash of all sources below cuda/, the flags, the
compiler's version and the architecture. The process of a node that gets the lock of a source compiles it and publishes
it by rename; so a half-written file is never read. No MPI is needed, because the folder is local to the node.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import logging
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mpispeed.base import assets
from mpispeed.base.errors import NativeMissing
from mpispeed.base.log import once
from mpispeed.native.cuda import toolchain

_logger = logging.getLogger(__name__)

BUILT_VARIABLE = "MPISPEED_KERNELS"
"""A folder of `mpispeed kernels build`, to be used instead of a compiler."""

CACHE_VARIABLE = "MPISPEED_KERNEL_CACHE"
"""Where kernels are kept that were compiled at first use, instead of a folder in TMPDIR."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@cache
def source_digest() -> str:
    """A hash of every file below cuda/, with its name."""
    folder, digest = assets.folder("cuda"), hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".cu", ".cuh", ".h"}:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def file_name(source: str, arch: str, compiler: str | None = None) -> str:
    """Name of the machine code of a source.

    Its hash includes the compiler's version for files compiled at first use, not for prebuilt ones, which need no
    compiler.
    """
    words = "\0".join([source_digest(), *toolchain.FLAGS, compiler or "", arch])
    return f"{Path(source).stem}.{arch}.{hashlib.sha256(words.encode()).hexdigest()[:16]}.cubin"


def machine_code(source: str, arch: str) -> bytes:
    """The machine code of one file below cuda/: built ahead, kept, or compiled now.

    Raises:
        NativeMissing: nothing fitting was built, and it cannot be compiled here; or another user could have written it.
    """
    built = _built_ahead(source, arch)
    if built is not None:
        return built
    compiler = toolchain.version(toolchain.find_nvcc())
    kept = cache_folder() / file_name(source, arch, compiler)
    if not kept.exists():
        _make(source, arch, kept, waits=True)
    return _read(kept)


def compile_missing(wanted: Iterable[str], arch: str) -> list[str]:
    """Compile what was neither built ahead nor kept, as many sources at a time as this process may use cores.

    Processes of a node that do so together share the work: what another one is at is waited for when nothing else is
    left to compile.

    Returns:
        The sources that this process compiled.

    Raises:
        NativeMissing: as `machine_code` says, of the first source that cannot be had.
    """
    missing = [source for source in wanted if _built_ahead(source, arch) is None]
    if not missing:
        return []
    toolchain.check_architecture(arch)
    compiler, folder = toolchain.version(toolchain.find_nvcc()), cache_folder()
    places = {source: folder / file_name(source, arch, compiler) for source in missing}
    missing = [source for source in missing if not places[source].exists()]
    if not missing:
        return []
    cores = min(len(os.sched_getaffinity(0)), len(missing))
    said = f"{len(missing)} sources of kernels are compiled for {arch}, {cores} at a time; once on this node"
    once(_logger, logging.INFO, said)
    made: list[str] = []
    with ThreadPoolExecutor(cores) as pool:
        try:
            for waits in (False, True):
                done = list(
                    pool.map(lambda source, waits=waits: _make(source, arch, places[source], waits=waits), missing)
                )
                made += [source for source, is_mine in zip(missing, done, strict=True) if is_mine]
                missing = [source for source, is_mine in zip(missing, done, strict=True) if is_mine is None]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return made


def _make(source: str, arch: str, kept: Path, *, waits: bool) -> bool | None:
    """Compile a source if nobody did: whether this process did it, None if another is at it that is not waited for.

    Raises:
        NativeMissing: it does not compile, or cannot be written there.
    """
    try:
        with _locked(kept, waits=waits) as is_locked:
            if not is_locked:
                return None
            if kept.exists():
                return False
            code, _ = toolchain.compile_source(source, arch)
            publish(code, kept)
            return True
    except OSError as error:  # a folder that may only be read, a full disk
        msg = (
            f"cannot keep the compiled {source} in {kept.parent}: {error}; set {CACHE_VARIABLE} to a folder of yours "
            f"on a local disk, or {BUILT_VARIABLE} to one of `mpispeed kernels build`"
        )
        raise NativeMissing(msg) from error


def publish(code: bytes, path: Path) -> None:
    """Write a file so that nobody sees a part of it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _built_ahead(source: str, arch: str) -> bytes | None:
    name, named = file_name(source, arch), os.environ.get(BUILT_VARIABLE)
    if named and Path(named).is_dir():
        check_trusted(Path(named).stat(), f"{BUILT_VARIABLE}={named}")
        if (Path(named) / name).is_file():
            return _read(Path(named) / name)
    inside = assets.folder("cuda") / "built" / name
    if inside.is_file():
        return inside.read_bytes()
    if named:
        what = f"{BUILT_VARIABLE}={named} has no {name}: it was built for "
        once(
            _logger,
            logging.WARNING,
            what + f"{_found(Path(named))}; this one needs {arch}. Run `mpispeed kernels build`",
        )
    return None


def _found(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.cubin")) if folder.is_dir() else []
    archs = sorted({found[0] for name in names for found in [re.findall(r"sm_\w+", name)] if found})
    return (
        f"{' and '.join(archs)}, maybe of another version" if archs else "nothing (no such folder, or no cubin in it)"
    )


def cache_folder() -> Path:
    """The folder of this user and node for kernels that were compiled at first use; made if it is missing.

    Raises:
        NativeMissing: it cannot be made, or another user could write into it.
    """
    named = os.environ.get(CACHE_VARIABLE)
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"mpispeed-kernels-{_user()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat() if named else folder.lstat()
    except OSError as error:
        msg = f"cannot make {folder} for compiled kernels: {error}; set {CACHE_VARIABLE} to a folder on a local disk"
        raise NativeMissing(msg) from error
    if named:
        check_trusted(found, f"{CACHE_VARIABLE}={folder}")
    elif not stat.S_ISDIR(found.st_mode) or found.st_mode & _OTHERS_WRITE or found.st_uid != os.getuid():
        msg = (
            f"{folder} is not a folder that only you can write, so kernels in it are not trusted; remove it, or set "
            f"{CACHE_VARIABLE} to a folder of yours on a local disk"
        )
        raise NativeMissing(msg)
    return folder


def check_trusted(found: os.stat_result, called: str) -> None:
    """Refuse a folder or a file of machine code that another user can write to: a process would run it.

    Trusted are the user, root, and the owner of this package, who can change what runs here anyway.

    Raises:
        NativeMissing: it is not to be trusted; `called` is its name in the message.
    """
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        why = f"others can write there (its mode is {mode:#o}); take that right away with chmod go-w"
    elif found.st_uid not in (os.getuid(), 0, assets.folder("cuda").stat().st_uid):
        owner = f"user {_name_of(found.st_uid)}"
        why = f"it belongs to {owner}, not to you, root or the owner of mpispeed; take a folder of your own"
    else:
        return
    msg = f"{called}, with machine code for the GPU, is not trusted: {why}"
    raise NativeMissing(msg)


def _read(path: Path) -> bytes:
    """Content of a file, if no other user can write to it."""
    with path.open("rb") as file:
        check_trusted(os.fstat(file.fileno()), str(path))
        return file.read()


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _user() -> str:
    try:
        return re.sub(r"\W", "_", getpass.getuser())
    except (KeyError, OSError):  # a user without a name, as in a container
        return str(os.getuid())


@contextmanager
def _locked(path: Path, *, waits: bool) -> Iterator[bool]:
    """The lock of a source. A file system without locks gives it to everybody: work is done twice, and no more."""
    with (path.parent / f".{path.stem}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield True
