"""Files of results: lines of JSON, and HDF5.

/                   attributes: format, version, identity (JSON), complete, requests, answered
/id                 of the prompt; text of variable length
/prompt, /sample    position of the prompt in its file, and which of its answers; int64, int32
/text, /error       texts of variable length
/tokens, /offsets   new token ids of all answers, int32; where those of each begin, and the end, int64
/prompt_tokens      tokens of the prompt, int32
/finish_reason      an enumeration of bytes

"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from mpispeed.base.files import sync_folder
from mpispeed.ckpt.format import hdf5, kinds
from mpispeed.generation.answers import PENDING, REASONS, Answer
from mpispeed.generation.finished import WorkError
from mpispeed.generation.identity import Identity, OtherJob

log = logging.getLogger(__name__)

FORMAT = "mpispeed-results-1"
VERSION = 1

_ENUM = h5py.enum_dtype({reason: code for code, reason in enumerate(REASONS)}, basetype="u1")
_TEXT = h5py.string_dtype()


class Sink(Protocol):
    """A file that answers are written to, in order."""

    def put(self, rows: Sequence[Row]) -> None:
        """Write the next ones."""

    def finish(self) -> None:
        """Write what is still to be written, and close the file."""

    def abandon(self) -> None:
        """Close the file after a failure."""


@dataclass(frozen=True, slots=True)
class Row:
    """An answer with its prompt's id and places."""

    id: str
    source: int
    sample: int
    answer: Answer


def read_identity(path: Path) -> tuple[Identity, dict[str, int]]:
    """Whose results a file has, and its numbers: complete (0 or 1), requests, answered.

    Raises:
        OtherJob: it is no file of results, or cannot be read.
    """
    try:
        with kinds.opened(path) as file:
            found = hdf5.attributes(file["/"].id)
            if found.text("format") != FORMAT:
                msg = f"its format is {found.text('format')!r:.80}; expected {FORMAT}"
                raise ValueError(msg)  # noqa: TRY301 - joins what HDF5 says
            # files of the first days have no version
            version, known = kinds.version_of({kinds.VERSION: VERSION, **found}), (VERSION, 0)
            if why := kinds.refusal(version, known):
                msg = f"they are {why}"
                raise ValueError(msg)  # noqa: TRY301
            if version and (warning := kinds.warning(version, known)):
                log.warning("%s has results %s", path, warning)
            numbers = {name: int(found[name]) for name in ("complete", "requests", "answered")}
            return Identity.from_json(found.text("identity")), numbers
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as failure:
        text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
        msg = f"{path} is no file of results: {text!s:.300}"
        raise OtherJob(msg) from failure


@contextlib.contextmanager
def replaced(path: Path, identity: Identity, make: Callable[[Path], Sink]) -> Iterator[Sink]:
    """Context with the sink of a temporary file, which takes the place of `path` when it is on disk.

    What a kill left of an earlier one of this job is removed.

    Raises:
        WorkError: the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.tmp-{identity.digest[-16:]}")
    try:
        temporary.unlink(missing_ok=True)
        sink = make(temporary)
        try:
            yield sink
            sink.finish()
        except BaseException:
            with contextlib.suppress(Exception):
                sink.abandon()
            raise
        handle = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as failure:
        temporary.unlink(missing_ok=True)
        if isinstance(failure, WorkError):
            raise
        msg = f"the results {path} cannot be written: {failure.strerror or failure}; nothing that is finished is lost: "
        msg += "make room, and start the job again"
        raise WorkError(msg) from failure
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class JsonLines:
    """Answers as lines of JSON."""

    def __init__(self, path: Path, *, with_token_ids: bool) -> None:
        self._with_token_ids = with_token_ids
        self._file = path.open("x", encoding="utf-8")

    def put(self, rows: Sequence[Row]) -> None:
        """Write the next answers."""
        for row in rows:
            answer = row.answer
            if answer.reason == PENDING:
                continue
            line: dict[str, Any] = {"id": row.id, "index": row.source, "sample": row.sample, "text": answer.text}
            line["finish_reason"] = REASONS[answer.reason]
            line["prompt_tokens"], line["new_tokens"] = answer.prompt_tokens, len(answer.tokens)
            if self._with_token_ids:
                line["token_ids"] = np.asarray(answer.tokens).tolist()
            if answer.error:
                line["error"] = answer.error
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Close the file after a failure."""
        self._file.close()


class ResultTables:
    """Answers as datasets of an HDF5 file."""

    def __init__(self, path: Path, identity: Identity, tokens: int, answered: int) -> None:
        self._file = h5py.File(path, "x", libver=("v110", "v110"), locking=False)
        count = identity.requests
        kinds: dict[str, tuple[int, Any]] = {
            "id": (count, _TEXT),
            "prompt": (count, "<i8"),
            "sample": (count, "<i4"),
            "text": (count, _TEXT),
            "error": (count, _TEXT),
            "finish_reason": (count, _ENUM),
            "prompt_tokens": (count, "<i4"),
            "tokens": (tokens, "<i4"),
            "offsets": (count + 1, "<i8"),
        }
        self._tables = {
            name: self._file.create_dataset(name, (size,), dtype, track_times=False)
            for name, (size, dtype) in kinds.items()
        }
        self._rows = self._tokens = 0
        is_complete = answered == count
        numbers = {"version": VERSION, "complete": int(is_complete), "requests": count, "answered": answered}
        for name, text in (("format", FORMAT), ("identity", identity.as_json())):
            raw = text.encode()
            self._file.attrs.create(name, np.array(raw, f"S{len(raw)}"), dtype=h5py.string_dtype("utf-8", len(raw)))
        for name, number in numbers.items():
            self._file.attrs.create(name, number, dtype="<i8")

    def put(self, rows: Sequence[Row]) -> None:
        """Write the next answers."""
        answers = [row.answer for row in rows]
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.asarray(each.tokens, np.int32) for each in answers)])
        ends = self._tokens + np.cumsum([len(each.tokens) for each in answers], dtype=np.int64)
        columns: dict[str, Any] = {
            "id": [row.id for row in rows],
            "prompt": [row.source for row in rows],
            "sample": [row.sample for row in rows],
            "text": [each.text.replace("\0", "\ufffd") for each in answers],  # texts of HDF5 end at NUL
            "error": [each.error.replace("\0", "\ufffd") for each in answers],
            "finish_reason": np.array([each.reason for each in answers], np.uint8),
            "prompt_tokens": [each.prompt_tokens for each in answers],
        }
        for name, column in columns.items():
            self._tables[name][self._rows : self._rows + len(rows)] = column
        if len(tokens):
            self._tables["tokens"][self._tokens : self._tokens + len(tokens)] = tokens
        self._tables["offsets"][self._rows + 1 : self._rows + 1 + len(rows)] = ends
        self._rows, self._tokens = self._rows + len(rows), self._tokens + len(tokens)

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def abandon(self) -> None:
        """Close the file after a failure."""
        self._file.close()
