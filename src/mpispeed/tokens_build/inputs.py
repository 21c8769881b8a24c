"""Files that are read: found, told apart, and compared with what they were when a build began."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from mpispeed.base.plain import printable
from mpispeed.tokens_build.errors import BuildError

JSON_LINES, TEXT, PARQUET, ARROW, MEGATRON = "jsonl", "text", "parquet", "arrow", "megatron"
STORE = "store"
FORMATS = (JSON_LINES, TEXT, PARQUET, ARROW, MEGATRON)
DOCUMENTS = ("line", "paragraph", "file")

SUFFIXES = {
    ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".txt": TEXT, ".text": TEXT, ".parquet": PARQUET, ".arrow": ARROW,
    ".feather": ARROW, ".bin": MEGATRON, ".idx": MEGATRON,
}  # fmt: skip

MOST_INPUTS = 1 << 20

MOST_DOCUMENT_BYTES = 256 << 20
"""Of one document in its file; longer ones are records that cannot be used."""

BATCH_BYTES = 4 << 20
"""Texts are handed to a tokenizer in batches of about so many bytes."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file, as it was when the build began.

    Attributes:
        path: as it was given; of Megatron's pairs that of the index.
        kind: one of FORMATS, or STORE.
        size: bytes.
        time: of its last change, nanoseconds.
        data_size: of the other file of Megatron's pairs, which has the tokens.
        data_time: of that file.
    """

    path: str
    kind: str
    size: int
    time: int
    data_size: int = 0
    data_time: int = 0

    @property
    def data_path(self) -> str:
        """The file of the tokens of a pair of Megatron."""
        from mpispeed.curriculum.index_layout import data_path  # imports torch

        return str(data_path(self.path.removesuffix(".idx")))


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one input, from `begin` to before `stop`, in units of its format: bytes, row groups, documents.

    `weight` is its size in bytes, as far as that is known.
    """

    input: int
    begin: int
    stop: int
    weight: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which inputs are read.

    Attributes:
        field: the entry or column that has texts or token ids.
        documents: what a document of a text file is: "line", "paragraph" (until an empty line) or "file".
    """

    field: str = "text"
    documents: str = "line"


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Documents whose tokens are in the input: all tokens one after the other, and the length of each.

    Shapes: tokens [N] of any integer dtype; lengths [D], their sum is N.
    """

    tokens: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int64]


Batch = list[str] | TokenRun
"""Documents as they come from an input."""


def find_inputs(paths: Sequence[Path | str], kind: str | None = None) -> list[Input]:
    """The files of these paths, in order; of a folder all files with known endings, by name.

    Args:
        paths: files and folders; a pair of Megatron by either of its files, or without an ending.
        kind: one of FORMATS, for files whose ending does not tell it.

    Raises:
        BuildError: a file is not there, cannot be read, or is of no known kind; or there are none.
    """
    found: list[Input] = []
    seen: set[str] = set()
    for path in paths:
        for each in _expanded(Path(path)):
            one = _input(each, kind)
            if one.kind == MEGATRON and one.path in seen:
                continue  # the other file of a pair
            seen.add(one.path)
            found.append(one)
            if len(found) > MOST_INPUTS:
                msg = f"there are more than {MOST_INPUTS} files to read; join some of them"
                raise BuildError(msg)
    if not found:
        msg = f"there is nothing to read in {', '.join(printable(str(path), 200) for path in paths) or 'no files'}"
        raise BuildError(msg)
    return found


def _expanded(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    try:
        names = sorted(path.rglob("*"))
    except OSError as failure:
        msg = f"the folder {printable(str(path))} cannot be read: {failure.strerror}"
        raise BuildError(msg) from failure
    yield from (each for each in names if _kind_of(each) is not None and each.is_file())


def _kind_of(path: Path) -> str | None:
    stem = path.with_suffix("") if path.suffix == ".gz" else path
    return SUFFIXES.get(stem.suffix)


def _input(path: Path, kind: str | None) -> Input:
    kind = kind or _kind_of(path)
    if kind is None and path.with_name(path.name + ".idx").is_file():
        kind = MEGATRON
    if kind == MEGATRON:
        path = path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else path.with_name(path.name + ".idx")
    size, time = _status(path)
    if kind is None:
        msg = f"what {printable(str(path))} has is not known by its name; say it with --format ({', '.join(FORMATS)})"
        raise BuildError(msg)
    one = Input(str(path), kind, size, time)
    return one if kind != MEGATRON else Input(one.path, kind, size, time, *_status(Path(one.data_path)))


def _status(path: Path) -> tuple[int, int]:
    """Bytes of an ordinary file, and the time of its last change."""
    try:
        status = path.stat()
    except (OSError, ValueError) as failure:
        msg = f"{printable(str(path))} cannot be read: {getattr(failure, 'strerror', None) or failure}"
        raise BuildError(msg) from failure
    if not stat.S_ISREG(status.st_mode):
        msg = f"{printable(str(path))} is no ordinary file"
        raise BuildError(msg)
    return status.st_size, status.st_mtime_ns


def open_input(one: Input) -> BinaryIO:
    """Open an input that is what it was; of a pair of Megatron the index.

    Raises:
        BuildError: it cannot be read, or has changed since the build began.
    """
    return _open_same(one.path, one.size, one.time)


def open_data(one: Input) -> BinaryIO:
    """Open the tokens of a pair of Megatron. Raises as `open_input`."""
    return _open_same(one.data_path, one.data_size, one.data_time)


def _open_same(path: str, size: int, time: int) -> BinaryIO:
    try:
        file = open(path, "rb", buffering=1 << 20, opener=_opener)  # noqa: SIM115 - the caller closes it
        status = os.fstat(file.fileno())
    except OSError as failure:
        msg = f"{printable(path)} cannot be read: {failure.strerror}"
        raise BuildError(msg) from failure
    if not stat.S_ISREG(status.st_mode) or (status.st_size, status.st_mtime_ns) != (size, time):
        file.close()
        msg = f"{printable(path)} has changed since the build began; leave its inputs alone, and start again"
        raise BuildError(msg)
    return file


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
