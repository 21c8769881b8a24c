"""Prompts of a JSONL or HDF5 file: one scan, an index of byte ranges, and each prompt read when it is needed.

The first rank scans the file and shares the index, some 30 bytes for a prompt; no rank ever holds all texts. The other
ranks read by position, without HDF5. A prompt is compared with its checksum whenever it is read, so a file that is
written over while a job runs is noticed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.generation import hdf5_tables, prompt_lines, prompt_tables
from mpispeed.generation.prompt_index import JSON_LINES, TEXT, Index, Spans
from mpispeed.generation.prompt_lines import Record
from mpispeed.generation.requests import MOST_ANSWERS, Prompt, PromptError, options_of
from mpispeed.native.checksum import crc32c

MOST_BYTES = 16 << 20
"""Of one prompt in its file; longer ones are refused."""

MOST_REQUESTS = 2**40
"""Answers of one job."""


def open_prompts(
    path: Path | str,
    *,
    field: str = "prompt",
    id_field: str | None = "id",
    samples: int = 1,
    most_bytes: int = MOST_BYTES,
    index: Index | None = None,
) -> Prompts:
    """Open a file of prompts.

    A JSONL file has one text or one object for each prompt. In an object, `field` is a text, a list of token ids or a
    list of chat messages; without it, "messages" is looked for. Options of `Options` may stand beside it, also under
    the names of OpenAI's interface, and OpenAI's batch files ("custom_id" and "body") are read too. Empty lines do not
    count. In an HDF5 file, `field` is a dataset of texts, or a group of the datasets "tokens" (all token ids one after
    the other) and "offsets" (n + 1); `id_field` and the options are datasets beside it, with n elements.

    Args:
        path: of the file.
        field: the entry of objects, or the dataset or group, that has the prompts.
        id_field: that of ids, which have to be unique; None: prompts are called by their position in the file.
        samples: answers that are wanted to each prompt that has no option `n`.
        most_bytes: longer prompts are refused.
        index: as another rank found it; the file is not scanned then.

    Raises:
        PromptError: the file cannot be read or is none of prompts; the message names the lines.
    """
    path = Path(path)
    if not 1 <= samples <= MOST_ANSWERS:
        msg = f"{samples} answers to each prompt are asked for; expected 1 to {MOST_ANSWERS}"
        raise PromptError(msg)
    handle = _open(path)
    try:
        if index is None:
            index = _scan(path, field, id_field, most_bytes)
        return Prompts(path, handle, index, samples)
    except BaseException:
        os.close(handle)
        raise


def _open(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        problem = "it is no ordinary file"
    except OSError as failure:
        problem = failure.strerror or str(failure)
    msg = f"the prompts {path} cannot be read: {problem}"
    raise PromptError(msg)


def _scan(path: Path, field: str, id_field: str | None, most_bytes: int) -> Index:
    try:
        with path.open("rb") as file:
            if file.read(len(hdf5_tables.MAGIC)) == hdf5_tables.MAGIC:
                return prompt_tables.scan(path, file, field, id_field, most_bytes)
            file.seek(0)
            return prompt_lines.scan(path, file, field, id_field, most_bytes)
    except OSError as failure:
        msg = f"the prompts {path} cannot be read: {failure.strerror or failure}"
        raise PromptError(msg) from failure


def _changed(path: Path) -> PromptError:
    msg = f"{path} is not what it was when the job looked at it; leave the file of prompts alone while a job runs, and "
    msg += "start again"
    return PromptError(msg)


class Prompts:
    """The answers that are wanted of a job, in the order of the file; a prompt with n answers is there n times.

    Use as a context manager, or call `close`. Reading is safe from several threads.

    Attributes:
        path: of the file.
        index: for the other ranks' `open_prompts`.
        digest: of the bytes of the file, "blake2b:...".
    """

    def __init__(self, path: Path, handle: int, index: Index, samples: int) -> None:
        self.path, self.index, self.digest = path, index, index.digest
        self._handle = handle
        if os.fstat(handle).st_size != index.size_bytes:
            raise _changed(path)
        counts = np.where(index.counts == 0, samples, index.counts)
        #: the first request of each prompt, and the number of all
        self._firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        if len(counts) * MOST_ANSWERS > MOST_REQUESTS and int(self._firsts[-1]) > MOST_REQUESTS:
            msg = f"{path} asks for more than 2^40 answers"
            raise PromptError(msg)

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __len__(self) -> int:
        """Answers that are wanted."""
        return int(self._firsts[-1])

    @property
    def sources(self) -> int:
        """Prompts in the file."""
        return len(self._firsts) - 1

    def source_of(self, number: int) -> tuple[int, int]:
        """Position in the file of the prompt of request `number`, and which of its answers the request is.

        Raises:
            IndexError: there is no such request.
        """
        if not 0 <= number < len(self):
            msg = f"{self.path} has {len(self)} answers to give; there is no number {number}"
            raise IndexError(msg)
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return source, number - int(self._firsts[source])

    def __getitem__(self, number: int) -> Prompt:
        """Request `number`, read from the file.

        Raises:
            IndexError: there is no such request.
            PromptError: the file is not what it was.
        """
        source, sample = self.source_of(number)
        record = self._record(source)
        name = str(source) if record.id is None else record.id
        where = f"{self.path}, prompt {source} (id {printable(name, 60)})"
        return Prompt(number, where, name, sample, record.content, record.options)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    def name_of(self, source: int) -> str:
        """The id of the prompt at this position in the file. Raises as `__getitem__`."""
        index = self.index
        if index.kind == JSON_LINES:
            return self._record(source).id or str(source)
        if index.ids is not None:
            return self._read(index.ids, source).decode()
        column = index.columns.get(index.id_field or "")
        return str(source if column is None else column[source])

    def _record(self, source: int) -> Record:
        index = self.index
        raw = self._read(index.contents, source)
        if index.kind == JSON_LINES:
            return prompt_lines.parse(raw, index.field, index.id_field)
        content: Any = raw.decode() if index.kind == TEXT else tuple(np.frombuffer(raw, index.dtype).tolist())
        said = {key: column[source].item() for key, column in index.columns.items() if key != index.id_field}
        given = {key: value for key, value in said.items() if value >= 0}  # not NaN either
        return Record(self.name_of(source), content, options_of(given))

    def _read(self, spans: Spans, source: int) -> bytes:
        start, left = int(spans.starts[source]), int(spans.sizes[source])
        parts = []
        while left:
            part = os.pread(self._handle, left, start)
            if not part:
                raise _changed(self.path)
            parts.append(part)
            start, left = start + len(part), left - len(part)
        raw = b"".join(parts)
        if crc32c(raw) != int(spans.checksums[source]):
            raise _changed(self.path)
        return raw
