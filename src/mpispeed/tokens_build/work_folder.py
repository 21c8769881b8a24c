"""The folder beside a store in which it is built: what is built from what, and the parts that are done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mpispeed.base.files import sync_folder
from mpispeed.base.plain import printable, read_plain
from mpispeed.tokens import reader
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.inputs import MEGATRON, Input
from mpispeed.tokens_build.part_file import new_file, part_name

_JOB, _LOCK, _STOP, _STORE, _MADE = "job.json", "lock", "stop", "store.h5", "made.json"
_UNFINISHED = (f"{_JOB}.tmp", f"{_MADE}.tmp")
_PARTS = ".parts"
_PART = re.compile("part-[0-9]{7}")
_FORMAT = "mpispeed parts of a token store"
_MOST_JOB_BYTES = 1 << 30
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
"""Of a file system that gives a file no second name, or none in another folder."""


@dataclass(frozen=True)
class Job:
    """The inputs and arguments of a build.

    Attributes:
        arguments: those that the result depends on, by the names of options.
        inputs: as they were when the build began.
        parts: their number.
    """

    arguments: Mapping[str, Any]
    inputs: Sequence[Input]
    parts: int

    def text(self) -> str:
        """As it stands in the folder."""
        files = [astuple(one) for one in self.inputs]
        return json.dumps(
            {"format": _FORMAT, "arguments": dict(self.arguments), "parts": self.parts, "inputs": files}, indent=0
        )

    @property
    def digest(self) -> str:
        """Of all that is in it."""
        return blake2b(self.text().encode(), digest_size=16).hexdigest()


def folder_of(output: Path) -> Path:
    """Where the store `output` is built."""
    return output.with_name(f"{output.name}{_PARTS}")


@dataclass
class WorkFolder:
    """The folder of parts, as each rank sees it.

    Attributes:
        output: the store that is built.
        path: of the folder.
    """

    output: Path
    path: Path = field(init=False)
    _lock: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.path = folder_of(self.output)

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self.path / part_name(number)

    @property
    def store(self) -> Path:
        """The store, until it is complete."""
        return self.path / _STORE

    def begin(self, job: Job) -> bool:
        """Make the folder, or go on with what is there; False if the store is complete already. For one rank.

        Raises:
            BuildError: something else is there, other inputs or arguments were used before, or another build runs.
        """
        is_begun = (self.path / _JOB).exists()
        if os.path.lexists(self.output) and not is_begun:
            if self._is_emptied():
                return False
            with contextlib.suppress(OSError):
                self.path.rmdir()  # an empty folder only: a kill came at the last step of `remove`
            self._refuse_input(job)
            msg = f"{printable(str(self.output))} exists; remove it, or give another name"
            raise BuildError(msg)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not is_begun:
                self._refuse_others()
            self._take_lock()
            if is_begun:
                self._compare(job)
            else:
                self._write_job(job)
            if os.path.lexists(self.output):
                self._check_made(job)
                return False
            for name in (_STOP, _MADE, _STORE):
                (self.path / name).unlink(missing_ok=True)
        except OSError as failure:
            self.release()
            msg = f"the folder of parts {printable(str(self.path))} cannot be used: {failure.strerror or failure}"
            raise BuildError(msg) from failure
        except BuildError:
            self.release()
            raise
        return True

    def discard(self) -> None:
        """Remove the folder of a build that failed, if nothing in it helps the next one. For one rank.

        So a mistake in an argument, which is seen at the first part, can be corrected without removing anything. A
        complete store that did not get its name stays.
        """
        with contextlib.suppress(OSError):
            is_of_use = self.done() or os.path.lexists(self.output) or _identity(self.store) is not None
            if self._lock >= 0 and not is_of_use:
                self.remove()

    def _is_emptied(self) -> bool:
        """Whether the folder was about to be removed, after the output got its name."""
        try:
            names = {each.name for each in self.path.iterdir()}
        except OSError:
            return False
        return names <= {_LOCK, _MADE} and self._is_made()

    def _is_made(self) -> bool:
        """Whether the output is the store that was completed here."""
        try:
            told = json.loads(read_plain(self.path / _MADE, _MOST_JOB_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return told is not None and told == _identity(self.output)

    def _check_made(self, job: Job) -> None:
        if not self._is_made():
            self._refuse_input(job)
            msg = f"{printable(str(self.output))} exists, and is not the store that is built in "
            msg += f"{printable(str(self.path))}; move it away, and the same command goes on"
            raise BuildError(msg)

    def _refuse_input(self, job: Job) -> None:
        """Nobody is to be told to remove a file that is read."""
        for one in job.inputs:
            paths = (one.path, one.data_path) if one.kind == MEGATRON else (one.path,)
            if any(_is_same(Path(path), self.output) for path in paths):
                msg = f"the output {printable(str(self.output))} is one of the inputs; give another name"
                raise BuildError(msg)

    def _refuse_others(self) -> None:
        if any(each.name not in (_LOCK, _MADE, *_UNFINISHED) for each in self.path.iterdir()):
            msg = f"{printable(str(self.path))} is in the way: it has no parts of a build; remove it"
            raise BuildError(msg)

    def _write_job(self, job: Job) -> None:
        with new_file(self.path / _JOB) as file:
            file.write(job.text().encode())

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            if failure.errno in (errno.EWOULDBLOCK, errno.EACCES):
                msg = f"another build of {printable(str(self.output))} is running"
                raise BuildError(msg) from failure
            # a file system without locks: nothing tells two builds apart there

    def release(self) -> None:
        """Let another build have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _compare(self, job: Job) -> None:
        before = _read_job(self.path)
        after = json.loads(job.text())
        if before == after:
            return
        problem = _difference(before, after)
        msg = (
            f"{printable(str(self.path))} has parts of another build: {problem}; build as before, or remove that folder"
        )
        raise BuildError(msg)

    def check_seen(self, job: Job) -> None:
        """Check that this rank sees the folder that one of them made.

        Raises:
            BuildError: it does not.
        """
        try:
            is_same = (self.path / _JOB).stat().st_size == len(job.text().encode())
        except OSError:
            is_same = False
        if not is_same:
            msg = f"{printable(str(self.path))} was made by another rank and is not here; build in a folder that all "
            msg += "nodes share"
            raise BuildError(msg)

    def ask_to_stop(self) -> None:
        """Tell the other ranks that one of them has failed."""
        with contextlib.suppress(OSError):
            (self.path / _STOP).touch()

    def is_stopping(self) -> bool:
        """Whether a rank has failed."""
        return (self.path / _STOP).exists()

    def done(self) -> int:
        """How many parts have their name."""
        return len(_parts_in(self.path))

    def numbers(self) -> list[int]:
        """Numbers of the parts that have their name."""
        return sorted(int(name.removeprefix("part-")) for name in _parts_in(self.path))

    def publish(self) -> None:
        """Give the complete store its name, and remove the folder. For one rank.

        Raises:
            BuildError: the name was taken meanwhile, or the file system refuses; the store stays in the folder.
        """
        try:
            with new_file(self.path / _MADE) as file:  # tells this store from another one of its name after a kill
                file.write(json.dumps(_identity(self.store)).encode())
            _give_name(self.store, self.output)
            sync_folder(self.output.parent)
        except FileExistsError as failure:
            msg = (
                f"{printable(str(self.output))} exists by now; the store that was built is {printable(str(self.store))}"
            )
            raise BuildError(msg) from failure
        except OSError as failure:
            msg = f"the store cannot be given the name {printable(str(self.output))}: {failure.strerror or failure}; "
            msg += f"it is complete as {printable(str(self.store))}"
            raise BuildError(msg) from failure
        self.remove()

    def remove(self) -> None:
        """Remove the folder: what a build has put there, and nothing else."""
        with contextlib.suppress(OSError):
            for each in sorted(self.path.iterdir()):
                if each.name.startswith("part-") or each.name in (_STOP, _STORE, *_UNFINISHED):
                    each.unlink(missing_ok=True)
            for name in (_JOB, _LOCK, _MADE):  # the last one tells what the output is, until nothing else is there
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        self.release()


@contextlib.contextmanager
def work_folder(output: Path, *, is_first: bool) -> Iterator[WorkFolder]:
    """The folder of parts for one build by all ranks; after a failure what helps nobody is removed.

    Args:
        output: the store.
        is_first: this rank removes it.
    """
    folder = WorkFolder(output)
    try:
        yield folder
    except BuildError:  # on all ranks: none of them writes any more
        if is_first:
            folder.discard()
        raise
    finally:
        folder.release()


def _identity(path: Path) -> dict[str, Any] | None:
    """What tells a store from all others, as JSON has it: its sizes and checksums; None if it is no complete store."""
    try:
        manifest = reader.contents_of(path).manifest
    except (TokenStoreError, OSError):
        return None
    return {"sizes": dict(manifest.sizes), "lists": dict(manifest.lists)}


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _give_name(work: Path, name: Path) -> None:
    """Give a file a name that nothing has; its first name stays where the file system has links.

    Raises:
        FileExistsError: something has the name.
        OSError: the file system refuses.
    """
    try:
        os.link(work, name)
    except FileExistsError:
        if not _is_same(work, name):  # it is where NFS lost the reply, and asked again
            raise
    except OSError as failure:
        if failure.errno not in _NO_LINKS:
            raise
        if os.path.lexists(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(name)) from failure
        work.rename(name)


def _read_job(folder: Path) -> dict[str, Any]:
    path = folder / _JOB
    try:
        found = json.loads(read_plain(path, _MOST_JOB_BYTES))
        if isinstance(found, dict) and found.get("format") == _FORMAT:
            return found
        problem = "it does not say what is built"
    except (OSError, ValueError, RecursionError) as failure:
        problem = str(failure)
    msg = f"{printable(str(path))} cannot be used: {problem}; remove the folder, and build again"
    raise BuildError(msg)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    old, new = before.get("arguments", {}), after["arguments"]
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"{name} was {printable(str(old.get(name)), 100)}, and is {printable(str(new.get(name)), 100)} now"
    files = before.get("inputs", [])
    for one, other in zip(files, after["inputs"], strict=False):
        if one != other:
            if one[:2] != other[:2]:
                return f"{printable(other[0], 200)} is now in the place of {printable(str(one[0]), 200)}"
            path = other[0] if one[:4] != other[:4] else Input(*other).data_path
            return f"{printable(path, 200)} has changed since"
    return f"there were {len(files)} inputs, and are {len(after['inputs'])} now"


def _parts_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [each.name for each in entries if _PART.fullmatch(each.name)]


def unfinished(output: Path) -> str | None:
    """What is there of a store that is being built, in words; None where nothing is.

    Args:
        output: the store, or its folder of parts.
    """
    if output.suffix == _PARTS:
        output = output.with_suffix("")
    folder = folder_of(output)
    if not (folder / _JOB).is_file():
        return None
    try:
        found, done = _read_job(folder), len(_parts_in(folder))
    except (BuildError, OSError) as failure:
        return str(failure)
    name, place, arguments = printable(str(output)), printable(str(folder)), found.get("arguments", {})
    if "merge" in arguments:
        return f"{name} is not finished: it is merged in {place}; the same mpispeed data merge begins again"
    command = "build" if arguments.get("command") == "build" else "import"
    return (
        f"{name} is not finished: {place} has {done} of {found.get('parts')} parts; the same mpispeed data {command} "
        "goes on"
    )
