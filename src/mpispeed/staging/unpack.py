"""Unpacks an archive of an environment on one node, and removes it; runs by itself, with the standard library only.

    python -I -S unpack.py begin --name NAME --bytes N --inodes N [--place FOLDER] [--lease TEXT]
    python -I -S unpack.py unpack --archive FILE --seal SEAL --folder FOLDER [--consume]
    python -I -S unpack.py end --folder FOLDER
    python -I -S unpack.py clean

`begin` makes an empty folder of that name in every place of this node with room for the environment, and prints them,
the best first, after the name of the node; the launcher takes one that all nodes have. `unpack` fills it, and removes
the other ones. `end` removes the folder, `clean` those that earlier jobs of this user have left.

The folder is ours alone (0700, made anew, never one that is there), and holds `lock`, on which the processes of the job
have a shared lock: what is locked is never cleaned away. What is written is what the manifest of the archive lists,
plain files and folders, each with its digest; that of the manifest is part of the seal that the launcher hands out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path, without site-packages
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind the standard library
from mpispeed.base.errors import StagingError
from mpispeed.staging.archive import PLACEHOLDER, Manifest, Member, Seal, read_manifest
from mpispeed.staging.folders import check_folder, job_of, left_over, locked, make_folder, remove
from mpispeed.staging.places import candidates, unfit

SAID = "mpispeed staging: "
"""Beginning of lines on stderr that tell why a node cannot; launchers say other things there."""

_PIECE_BYTES = 4 << 20
_FILE_COST_BYTES = 64 << 10  # opening, closing and dating a file takes as long as writing so much


def fill(folder: Path, archive: int, manifest: Manifest, workers: int) -> None:
    """Write all members below `folder`, by `workers` processes.

    Raises:
        StagingError: data do not have their digest, or cannot be written.
    """
    for name in manifest.folders:
        (folder / name).mkdir(mode=0o700)
    parts = _split(manifest.members, workers)
    children: list[tuple[int, int]] = []
    try:
        for part in parts[1:]:
            children.append(_fork(folder, archive, part))
        said = [_written(folder, archive, parts[0])] if parts else []
        while children:
            said.append(_answer(*children[0]))
            del children[0]
    except BaseException:
        for child, _ in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)  # it writes nothing more into the folder that is going to be removed
        raise
    problems = [text for text in said if text]
    if problems:
        raise StagingError(problems[0])


def _split(members: Sequence[Member], parts: int) -> list[list[Member]]:
    """Members in runs of about equal work."""
    share = sum(member.size + _FILE_COST_BYTES for member in members) / max(1, parts)
    found: list[list[Member]] = [[]]
    done = 0.0
    for member in members:
        if done >= share * len(found):
            found.append([])
        found[-1].append(member)
        done += member.size + _FILE_COST_BYTES
    return [part for part in found if part]


def _answer(child: int, pipe: int) -> str:
    """What a process that unpacks has to say, at its end."""
    with os.fdopen(pipe, "rb") as answer:
        said = answer.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status and not said:
        return f"a process that unpacks ended by {'signal' if status < 0 else 'code'} {abs(status)}"
    return said


def _fork(folder: Path, archive: int, part: Sequence[Member]) -> tuple[int, int]:
    """Write members in a process of its own; return its number and where it tells what went wrong."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    code = 1
    try:
        text = _written(folder, archive, part)
        os.write(theirs, text.encode(errors="replace")[:4000])
        code = 0
    finally:
        os._exit(code)


def _written(folder: Path, archive: int, part: Sequence[Member]) -> str:
    """Write members; return what went wrong, or nothing."""
    try:
        for member in part:
            _write(folder, archive, member)
    except StagingError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder} cannot be written: {error.strerror}; see MPISPEED_STAGE_DIR"
    return ""


def _write(folder: Path, archive: int, member: Member) -> None:
    """Write a member, from bytes that were checked and not read again.

    Raises:
        StagingError: they do not have their digest.
    """
    digest = hashlib.sha256()
    path = f"{folder}/{member.path}"
    mode = 0o700 if member.mode & 0o111 else 0o600
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        longest = member.size if member.is_text else _PIECE_BYTES  # the word of a text must be in one piece
        for begin in range(0, member.size, max(1, longest)):
            length = min(longest, member.size - begin)
            piece = os.pread(archive, length, member.offset + begin)
            if len(piece) != length:
                msg = f"the archive ends inside of {member.path!r}"
                raise StagingError(msg)
            digest.update(piece)
            if member.is_text:
                piece = piece.replace(PLACEHOLDER, os.fsencode(folder))
            write_all(file, piece, path)
        if digest.hexdigest() != member.sha256:
            msg = f"the archive was changed: {member.path!r} does not have its SHA-256; pack it again"
            raise StagingError(msg)
        os.utime(file, ns=(member.mtime * 10**9, member.mtime * 10**9))
    finally:
        os.close(file)


def write_all(file: int, piece: bytes | memoryview, path: str) -> None:
    """Write all bytes to an open file.

    Raises:
        OSError: with `path` as its file name.
    """
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        error.filename = path
        raise


def begin(name: str, need_bytes: int, need_inodes: int, place: str = "", lease: str = "") -> list[Path]:
    """Make a folder `name` in every place with room; remove what earlier jobs have left.

    Raises:
        StagingError: there is no such place.
    """
    job = job_of(name)
    places = candidates(place)
    is_asked = bool(place or os.environ.get("MPISPEED_STAGE_DIR"))
    for path in left_over(places, job, lease):
        with contextlib.suppress(StagingError):
            remove(path)
    made: list[Path] = []
    problems = []
    for folder in places:
        reason = unfit(folder, need_bytes, need_inodes, is_asked=is_asked)
        try:
            if not reason:
                make_folder(folder / name, lease)
                made.append(folder / name)
        except (StagingError, OSError) as error:
            reason = str(error)
        if reason:
            problems.append(f"{folder}: {reason}")
    if not made:
        msg = f"no place for the environment ({'; '.join(problems)}); name one in MPISPEED_STAGE_DIR"
        raise StagingError(msg)
    return made


def unpack(archive: Path, seal: Seal, folder: Path, *, workers: int = 0, consumes: bool = False) -> Manifest:
    """Fill a folder that `begin` has made; on failure the folder is removed.

    Args:
        archive: the file, on this node or on a shared file system.
        seal: of the archive, from the launcher.
        folder: to fill; folders of the same name in other places are removed.
        workers: processes that write; 0 for one per core, at most 8.
        consumes: the archive is this node's copy, and is removed afterwards.

    Raises:
        StagingError: the archive is not the sealed one, or there is no room.
    """
    check_folder(folder)
    workers = workers or min(8, len(os.sched_getaffinity(0)))
    try:
        with locked(folder):
            file = os.open(archive, os.O_RDONLY | os.O_CLOEXEC | (os.O_NOFOLLOW if consumes else 0))
            try:
                manifest = read_manifest(file, seal)
                fill(folder, file, manifest, workers)
            finally:
                os.close(file)
            if consumes:
                archive.unlink()
            os.utime(folder / "lock")
    except OSError as error:
        remove(folder)
        msg = f"the environment cannot be unpacked: {error}"
        raise StagingError(msg) from None
    except BaseException:
        remove(folder)
        raise
    for place in candidates():
        other = place / folder.name
        if other != folder and os.path.lexists(other):
            remove(other)
    return manifest


def end(folder: Path) -> None:
    """Remove the folder of a job wherever `begin` may have made one of its name."""
    for path in dict.fromkeys((folder, *(place / folder.name for place in candidates()))):
        remove(path)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The words of a command line, of which `begin` is one."""
    parser = argparse.ArgumentParser(prog="unpack.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    beginning = commands.add_parser("begin")
    beginning.add_argument("--name", required=True)
    beginning.add_argument("--bytes", type=int, required=True)
    beginning.add_argument("--inodes", type=int, required=True)
    beginning.add_argument("--place", default="")
    beginning.add_argument("--lease", default="")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("--archive", type=Path, required=True)
    unpacking.add_argument("--seal", required=True)
    unpacking.add_argument("--folder", type=Path, required=True)
    unpacking.add_argument("--workers", type=int, default=0)
    unpacking.add_argument("--consume", action="store_true")
    commands.add_parser("end").add_argument("--folder", type=Path, required=True)
    commands.add_parser("clean").add_argument("--place", default="")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 1 after a sentence on stderr."""
    asked = arguments(sys.argv[1:] if words is None else words)
    host = socket.gethostname()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a half-filled folder is removed
    try:
        if asked.command == "begin":
            made = begin(asked.name, asked.bytes, asked.inodes, asked.place, asked.lease)
            sys.stdout.write("\t".join([host, *map(str, made)]) + "\n")
        elif asked.command == "unpack":
            unpack(asked.archive, Seal.parse(asked.seal), asked.folder, workers=asked.workers, consumes=asked.consume)
        elif asked.command == "end":
            end(asked.folder)
        else:
            for path in left_over(candidates(asked.place)):
                remove(path)
                sys.stdout.write(f"{path}\n")
    except StagingError as error:
        sys.stderr.write(f"{SAID}{host}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
