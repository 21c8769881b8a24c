"""A job of MPI that sends an archive to every node and unpacks it there; runs by itself, one rank of a node is enough.

    python -I broadcast.py stage ARCHIVE SEAL --name NAME --bytes N --inodes N [--place FOLDER]
    python -I broadcast.py end FOLDER

Rank 0 reads the archive once. Whatever fails on a node, all go on to the
next point where they meet, and leave together: rank 0 with code 1 and a sentence for every node that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started by its path
    sys.path.append(str(Path(__file__).resolve().parents[2]))
from mpi4py import MPI

from mpispeed.base.errors import StagingError
from mpispeed.staging import unpack
from mpispeed.staging.folders import locked
from mpispeed.staging.spread import common_place

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

CHUNK_BYTES = 16 << 20


def _leaders() -> Comm | None:
    """One rank of every node, that of rank 0 first; None on the others."""
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())
    leaders = world.Split(0 if node.Get_rank() == 0 else MPI.UNDEFINED, world.Get_rank())
    return None if leaders == MPI.COMM_NULL else leaders


def _meet(leaders: Comm, problem: str) -> str:
    """What went wrong on any node, the same on all; each problem once."""
    host = socket.gethostname()
    problems = [text for text in leaders.allgather(problem and f"{host}: {problem}") if text]
    if len(problems) > 3:
        return "\n".join([*problems[:3], f"and {len(problems) - 3} more nodes"])
    return "\n".join(problems)


def stage(leaders: Comm, archive: Path, seal: str, begin_words: Sequence[str]) -> tuple[str, Path | None]:
    """Send and unpack the archive; return what went wrong, and the folder.

    Collective over: the leaders.
    """
    with contextlib.ExitStack() as held:
        return _stage(leaders, archive, seal, unpack.arguments(["begin", *begin_words]), held)


def _stage(
    leaders: Comm, archive: Path, seal: str, asked: argparse.Namespace, held: contextlib.ExitStack
) -> tuple[str, Path | None]:
    """See `stage`; `held` keeps the locks of the folders, which nobody cleans away while the archive is sent."""
    made: list[Path] = []
    problem = ""
    try:
        made = unpack.begin(asked.name, asked.bytes, asked.inodes, asked.place, asked.lease)
        for path in made:
            held.enter_context(locked(path))
    except (StagingError, OSError) as error:
        problem = str(error)
    failed = _meet(leaders, problem)
    folder: Path | None = None
    if not failed:
        lines = leaders.allgather("\t".join(["", *map(str, made)]))
        try:
            folder = common_place([f"{number}{line}" for number, line in enumerate(lines)], len(lines))
            copy = folder / "archive.tar"
            failed = _meet(leaders, _sent(leaders, archive, copy)) or _meet(leaders, _unpacked(copy, seal, folder))
        except StagingError as error:  # no place in common, as all find
            failed = str(error)
    if failed:
        for path in made:
            with contextlib.suppress(StagingError):
                unpack.remove(path)
    return failed, folder


def _sent(leaders: Comm, archive: Path, copy: Path) -> str:
    """Send the archive from the first leader to files of all; return what went wrong here.

    Collective over: the leaders, to the end, also where a node can write no more.
    """
    problem = ""
    source = target = -1
    size = 0
    try:
        if leaders.Get_rank() == 0:
            source = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(source).st_size
        target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    size = leaders.bcast(size)
    chunk = bytearray(min(size, CHUNK_BYTES))
    for begin in range(0, size, CHUNK_BYTES):
        piece = memoryview(chunk)[: min(CHUNK_BYTES, size - begin)]
        if source >= 0 and not problem:
            problem = _read(source, piece, begin, archive)
        leaders.Bcast(piece)
        try:
            if target >= 0 and not problem:
                unpack.write_all(target, piece, str(copy))
        except OSError as error:
            problem = f"{copy} cannot be written: {error.strerror}"
    for file in (source, target):
        try:
            if file >= 0:
                os.close(file)
        except OSError as error:  # some file systems tell at the end only that there was no room
            problem = problem or f"{copy} cannot be written: {error.strerror}"
    return problem


def _read(file: int, piece: memoryview, begin: int, archive: Path) -> str:
    """Fill `piece` from the file; return what went wrong."""
    done = 0
    try:
        while done < len(piece):
            count = os.preadv(file, [piece[done:]], begin + done)
            if not count:
                return f"{archive} became shorter while it was sent"
            done += count
    except OSError as error:
        return f"{archive} cannot be read: {error.strerror}"
    return ""


def _unpacked(copy: Path, seal: str, folder: Path) -> str:
    """Unpack by a process of its own, because processes that have joined MPI should not fork."""
    words = [sys.executable, "-I", "-S", str(Path(unpack.__file__).resolve()), "unpack", "--archive", str(copy)]
    words += ["--seal", seal, "--folder", str(folder), "--consume"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        return f"no process can be started to unpack: {error.strerror}"
    said = done.stderr.strip() or f"unpack.py ended with exit code {done.returncode}"
    return said.removeprefix(unpack.SAID).partition(": ")[2] if done.returncode else ""


def main() -> int:
    """Entry point of every rank: 0, or 1 on rank 0 after a sentence on stderr."""
    command, *words = sys.argv[1:]
    leaders = _leaders()
    if leaders is None:
        return 0
    folder: Path | None = None
    if command == "stage":
        failed, folder = stage(leaders, Path(words[0]), words[1], words[2:])
    else:
        problem = ""
        try:
            unpack.end(Path(words[0]))
        except StagingError as error:
            problem = str(error)
        failed = _meet(leaders, problem)
    if leaders.Get_rank():
        return 0
    if failed:
        sys.stderr.write("".join(f"{unpack.SAID}{line}\n" for line in failed.splitlines()))
        return 1
    sys.stdout.write(f"{socket.gethostname()}\t{folder}\n")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # whatever it is: the others would wait for this rank without end
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
    else:
        sys.exit(code)
