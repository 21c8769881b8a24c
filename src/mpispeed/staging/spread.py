"""Gets an archive to the nodes of a job, and removes it there: by this process, by SLURM, or by a job of MPI.

The nodes do the work by themselves (`unpack`); here is who tells them. All nodes unpack to the same path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mpispeed.base.errors import StagingError
from mpispeed.staging import unpack
from mpispeed.staging.folders import locked, name_for
from mpispeed.staging.pack import Archive
from mpispeed.staging.places import PLACES

STAGED = "MPISPEED_STAGED"
"""Variable of ranks: the folder that their Python was unpacked to."""

LIMIT_SECONDS = 1800.0
"""For one command on all nodes; unpacking 1.6 GB takes minutes on slow disks."""

END_SECONDS = 30.0
"""For a command to end after it was told to, which removes what it has made; then it is killed."""

_UNPACK = (sys.executable, "-I", "-S", str(Path(unpack.__file__).resolve()))
_BROADCAST = str(Path(__file__).resolve().with_name("broadcast.py"))


@dataclass(frozen=True, slots=True)
class Staged:
    """An environment on the nodes of a job: an archive, and the folder it was unpacked to."""

    folder: Path
    archive: Archive

    @property
    def python(self) -> str:
        """The interpreter, on every node."""
        return str(self.folder / self.archive.python)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables for processes that start from there; programs of the environment are found there first."""
        found = {STAGED: str(self.folder), "PYTHONNOUSERSITE": "1"}
        found["PATH"] = _in_front(Path(self.python).parent, environ.get("PATH", ""))
        if self.archive.libraries:
            found["LD_LIBRARY_PATH"] = _in_front(
                self.folder / self.archive.libraries, environ.get("LD_LIBRARY_PATH", "")
            )
        if environ.get("PYTHONHOME"):
            found["PYTHONHOME"] = str(self.folder / "base")
        if "VIRTUAL_ENV" in environ:
            found["VIRTUAL_ENV"] = str(Path(self.python).parents[1])
        return found


def _in_front(folder: Path, path: str) -> str:
    return os.pathsep.join([str(folder), *([path] if path else [])])


class Reach(Protocol):
    """A way to the nodes of a job."""

    def stage(self, archive: Archive, name: str, place: str, lease: str = "") -> Path:
        """Unpack the archive to a folder `name` on every node; return its path, the same everywhere.

        Args:
            archive: to unpack.
            name: of the folder, from `name_for`.
            place: folder of the nodes to unpack to; empty: the first with room.
            lease: see `folders.make_folder`.

        Raises:
            StagingError: a node cannot, and then none has the folder.
        """

    def end(self, folder: Path) -> None:
        """Remove the folder on every node.

        Raises:
            StagingError: a node cannot.
        """


@contextmanager
def staged(
    reach: Reach, archive: Archive, job: str, place: str = "", lease: str = "", *, warn: Callable[[str], None]
) -> Iterator[Staged]:
    """The environment on the nodes, removed at the end.

    Args:
        reach: the way to them.
        archive: to unpack there.
        job: number of the job, for the name of the folder.
        place: folder of the nodes to unpack to, instead of the first with room.
        lease: see `folders.make_folder`; the lock is held here meanwhile.
        warn: takes a sentence if it cannot be removed, which is no failure of the job.

    Raises:
        StagingError: a node cannot unpack it.
    """
    folder = reach.stage(archive, name_for(job), place, lease)
    with ExitStack() as stack:
        with suppress(OSError):  # this may be none of the nodes
            stack.enter_context(locked(folder))
        try:
            yield Staged(folder, archive)
        finally:
            try:
                reach.end(folder)
            except StagingError as error:
                warn(f"{error}; the next start there removes it, or `mpispeed stage clean`")


def _begin_words(archive: Archive, name: str, place: str, lease: str, *, has_copy: bool) -> list[str]:
    room = archive.room + (archive.size if has_copy else 0)
    words = ["begin", "--name", name, "--bytes", str(room), "--inodes", str(archive.inodes + has_copy)]
    return [*words, *(["--place", place] if place else []), *(["--lease", lease] if lease else [])]


def _unpack_words(archive: Path, seal: str, folder: Path) -> list[str]:
    return ["unpack", "--archive", str(archive), "--seal", seal, "--folder", str(folder)]


def run_words(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, and return what it prints; a signal to us ends it.

    Raises:
        StagingError: it failed, with what it said, or takes too long, as where the file system of a node is gone.
    """
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=None if environ is None else {**os.environ, **environ},
        )  # fmt: skip
    except OSError as error:
        msg = f"staging of the environment: {words[0]} cannot be started: {error.strerror}"
        raise StagingError(msg) from None
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        except BaseException as error:
            process.terminate()
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                msg = (
                    f"staging of the environment: {Path(words[0]).name} has not ended within {LIMIT_SECONDS / 60:.0f} "
                    "minutes; a node or its file system may hang: leave it out, or start without --stage-env"
                )
                raise StagingError(msg) from None
            raise
    if process.returncode:
        said = _first_reason(err) or f"{words[0]} ended with exit code {process.returncode}"
        msg = f"staging of the environment: {said}"
        raise StagingError(msg)
    return out


def _first_reason(text: str) -> str:
    """The lines of the nodes, at most three; without any, the first of the launcher."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.partition(unpack.SAID)[2] for line in lines if unpack.SAID in line]
    return "; ".join(own[:3]) if own else next(iter(lines), "")


@dataclass(slots=True)
class Here:
    """This node alone: the archive is read where it is."""

    def stage(self, archive: Archive, name: str, place: str, lease: str = "") -> Path:
        """See `Reach`."""
        try:
            made = run_words([*_UNPACK, *_begin_words(archive, name, place, lease, has_copy=False)])
            folder = common_place(made.splitlines(), 1)
            run_words([*_UNPACK, *_unpack_words(archive.path, archive.seal, folder)])
        except BaseException:
            _give_up(self, name, place)
            raise
        return folder

    def end(self, folder: Path) -> None:
        """See `Reach`."""
        unpack.end(folder)


@dataclass(slots=True)
class SlurmSteps:
    """The nodes of an allocation, by steps of one task each; sbcast sends the archive from node to node.

    Attributes:
        nodes: their number.
        flags: of srun, such as those that choose some nodes.
        has_all: True if the nodes are all of the job, which is what sbcast sends to.
    """

    nodes: int
    flags: Sequence[str] = ()
    has_all: bool = True

    def _run(self, words: Sequence[str]) -> list[str]:
        step = ["srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--mpi=none"]
        step += ["--overlap", "--export=ALL", "--kill-on-bad-exit=0", *self.flags]
        return run_words([*step, *_UNPACK, *words]).splitlines()

    def stage(self, archive: Archive, name: str, place: str, lease: str = "") -> Path:
        """See `Reach`."""
        sends = self.has_all and self.nodes > 1 and shutil.which("sbcast") is not None
        try:
            folder = common_place(self._run(_begin_words(archive, name, place, lease, has_copy=sends)), self.nodes)
            source = archive.path
            if sends:
                source = folder / "archive.tar"
                run_words(["sbcast", str(archive.path), str(source)])
            self._run([*_unpack_words(source, archive.seal, folder), *(["--consume"] if sends else [])])
        except BaseException:
            _give_up(self, name, place)
            raise
        return folder

    def end(self, folder: Path) -> None:
        """See `Reach`."""
        self._run(["end", "--folder", str(folder)])


def _give_up(reach: Reach, name: str, place: str) -> None:
    """Remove what a failed start has made, on every node that answers; the reason of the failure is shown."""
    with suppress(StagingError):
        reach.end(Path(place or PLACES[0]) / name)


def common_place(lines: Sequence[str], nodes: int) -> Path:
    """The folder that all nodes have made, from what each has printed.

    Raises:
        StagingError: there is none, or a node is missing.
    """
    answers = {words[0]: words[1:] for words in (line.split("\t") for line in lines) if len(words) > 1}
    if len(answers) != nodes:
        msg = f"{len(answers)} of {nodes} nodes have answered ({', '.join(sorted(answers))}); the others have no place"
        raise StagingError(msg)
    first, *others = answers.values()
    for folder in first:
        if all(folder in other for other in others):
            return Path(folder)
    found = "; ".join(f"{host}: {', '.join(folders)}" for host, folders in sorted(answers.items()))
    msg = f"the nodes have no place in common ({found}); name one that all have in MPISPEED_STAGE_DIR"
    raise StagingError(msg)


@dataclass(slots=True)
class MpiJob:
    """Hosts of an mpirun, by a job of one rank each that sends the archive through MPI.

    Attributes:
        start: gives the command line and the variables that start a program so.
    """

    start: Callable[[Sequence[str]], tuple[Sequence[str], Mapping[str, str]]]

    def _run(self, words: Sequence[str]) -> str:
        argv, environ = self.start([sys.executable, "-I", _BROADCAST, *words])
        return run_words(argv, environ)

    def stage(self, archive: Archive, name: str, place: str, lease: str = "") -> Path:
        """See `Reach`."""
        words = [
            "stage",
            str(archive.path),
            archive.seal,
            *_begin_words(archive, name, place, lease, has_copy=True)[1:],
        ]
        try:
            return common_place(self._run(words).splitlines(), 1)
        except BaseException:
            _give_up(self, name, place)
            raise

    def end(self, folder: Path) -> None:
        """See `Reach`."""
        self._run(["end", str(folder)])


@dataclass(slots=True)
class Survivors:
    """Hosts of which some may be lost by the end, and are not waited for then.

    Attributes:
        hosts: their names.
        reach_to: the way to some of them.
        silence: asks all; gives those that do not answer, with the reason.
    """

    hosts: Sequence[str]
    reach_to: Callable[[Sequence[str]], Reach]
    silence: Callable[[], Mapping[str, str]]

    def stage(self, archive: Archive, name: str, place: str, lease: str = "") -> Path:
        """See `Reach`."""
        return self.reach_to(self.hosts).stage(archive, name, place, lease)

    def end(self, folder: Path) -> None:
        """See `Reach`."""
        lost = self.silence()
        if alive := [name for name in self.hosts if name not in lost]:
            self.reach_to(alive).end(folder)
        if lost:
            msg = f"{folder} may be left on {', '.join(sorted(lost))}, which cannot be asked"
            raise StagingError(msg)
