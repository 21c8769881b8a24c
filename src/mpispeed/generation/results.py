"""Results in the order of the prompts, in an HDF5 file, as lines of JSON, or both, from the finished batches of a job.

Batches are of like lengths and not in the order of the prompts. Their files are read as often as all answers are larger
than the memory that is allowed, each time for the next requests. A file takes its name when all of it is on disk.

The same answers make the same bytes, whatever ranks and starts they come from.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpispeed.base.plain import read_head
from mpispeed.base.units import format_bytes
from mpispeed.generation.answers import PENDING, TOO_LONG, Answer, arrays_of
from mpispeed.generation.batches import Batches
from mpispeed.generation.finished import Finished, WorkError
from mpispeed.generation.hdf5_tables import MAGIC
from mpispeed.generation.identity import Identity, OtherJob
from mpispeed.generation.prompts import Prompts
from mpispeed.generation.result_files import JsonLines, ResultTables, Row, Sink, read_identity, replaced

MEMORY_BYTES = 256 << 20
"""For answers, while results are written."""

#: of one answer beside its tokens and texts, as an object of Python and in a file
_OBJECT_BYTES, _ROW_BYTES = 500, 120
_TOKEN_BYTES, _JSON_TOKEN_BYTES = 4, 8
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes and batches of all answers, known before their texts are read. Shapes: (requests,)."""

    tokens: np.ndarray
    text_bytes: np.ndarray
    batch: np.ndarray


def refuse_taken(path: Path, identity: Identity, *, is_resumed: bool) -> None:
    """Check that a file of results may be written: it is not there, or belongs to this job.

    Lines of JSON do not say whose they are; they are this job's if its work folder was there before.

    Raises:
        OtherJob: it is there and not this job's.
    """
    if not path.exists() and not path.is_symlink():
        return
    problem = ""
    if _is_hdf5(path):
        try:
            found, _ = read_identity(path)
        except OtherJob as failure:
            problem = str(failure)
        else:
            differences = identity.differences(found)
            problem = (
                f"{path} has results of another job: these differ: {', '.join(differences)}" if differences else ""
            )
    elif not is_resumed:
        problem = f"{path} is there already"
    if problem:
        msg = f"{problem}; give this job another file of results, or move that one away"
        raise OtherJob(msg)


def write(
    prompts: Prompts,
    batches: Batches,
    finished: Finished,
    identity: Identity,
    *,
    hdf5_path: Path | None = None,
    json_path: Path | None = None,
    with_token_ids: bool = False,
    memory_bytes: int = MEMORY_BYTES,
) -> None:
    """Write the results as far as they are there; what is not answered yet is "pending", and has no line of JSON.

    To be called by one rank. Files of the same names are replaced: `refuse_taken` comes first.

    Args:
        prompts: of the job.
        batches: of the job.
        finished: as scanned just now.
        identity: of the job.
        hdf5_path: an HDF5 file to be written.
        json_path: a file of lines of JSON to be written.
        with_token_ids: lines of JSON have token ids too.
        memory_bytes: answers that are held at a time; one answer may be larger.

    Raises:
        WorkError: a file cannot be read or written, or there is no room for it.
        PromptError: the file of prompts is not what it was.
    """
    sizes = _sizes(finished, batches)
    answered = identity.requests - _pending(finished, batches)
    with contextlib.ExitStack() as files:
        sinks: list[Sink] = []
        if json_path is not None:
            _check_room(json_path, sizes, _JSON_TOKEN_BYTES if with_token_ids else 0)
            lines = replaced(json_path, identity, lambda path: JsonLines(path, with_token_ids=with_token_ids))
            sinks.append(files.enter_context(lines))
        if hdf5_path is not None:
            _check_room(hdf5_path, sizes, _TOKEN_BYTES)
            tokens = int(sizes.tokens.sum())
            tables = replaced(hdf5_path, identity, lambda path: ResultTables(path, identity, tokens, answered))
            sinks.append(files.enter_context(tables))
        for rows in _windows(prompts, batches, finished, sizes, memory_bytes):
            for sink in sinks:
                sink.put(rows)


def _pending(finished: Finished, batches: Batches) -> int:
    """Requests of batches that are not finished."""
    return int(np.diff(batches.starts)[~finished.done].sum())


def _sizes(finished: Finished, batches: Batches) -> _Sizes:
    count = len(batches.lengths)
    found = _Sizes(np.zeros(count, np.int64), np.zeros(count, np.int64), batches.batch_of())
    for batch in finished.in_file_order():
        arrays = arrays_of(finished.payload(batch))
        requests = arrays["requests"]
        found.tokens[requests] = np.diff(arrays["offsets"])
        found.text_bytes[requests] = np.diff(arrays["text_offsets"]) + np.diff(arrays["error_offsets"])
    return found


def _check_room(path: Path, sizes: _Sizes, token_bytes: int) -> None:
    needed = int(sizes.text_bytes.sum() + token_bytes * sizes.tokens.sum()) + _ROW_BYTES * len(sizes.tokens)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError as failure:
        msg = f"results cannot be written to {path.parent}: {failure.strerror}; make the folder"
        raise WorkError(msg) from failure
    if free < needed + _SLACK_BYTES:
        msg = (
            f"{path.parent} has {format_bytes(free)} free, and the results need about {format_bytes(needed)}; nothing "
        )
        msg += "that is finished is lost: make room, and start the job again"
        raise WorkError(msg)


def _windows(
    prompts: Prompts, batches: Batches, finished: Finished, sizes: _Sizes, memory_bytes: int
) -> Iterator[list[Row]]:
    """Answers in the order of requests, some at a time."""
    held = np.cumsum(_OBJECT_BYTES + 4 * sizes.tokens + 2 * sizes.text_bytes)
    in_order, first = finished.in_file_order(), 0
    while first < len(held):
        base = int(held[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(held, base + memory_bytes, side="right")))
        yield _window(prompts, batches, finished, in_order, sizes.batch, first, last)
        first = last


def _window(
    prompts: Prompts,
    batches: Batches,
    finished: Finished,
    in_order: np.ndarray,
    batch_of: np.ndarray,
    first: int,
    last: int,
) -> list[Row]:
    wanted = np.zeros(len(batches) + 1, bool)
    wanted[batch_of[first:last]] = True  # the last entry is of those that are left out
    answers: dict[int, Answer] = {}
    for batch in in_order[wanted[in_order]]:
        for answer in finished.answers(int(batch)).answers:
            if first <= answer.request < last:
                # a copy: a view would keep the whole record
                answers[answer.request] = _copied(answer)
    rows = []
    for request in range(first, last):
        answer = answers.get(request) or _unanswered(request, batches, batch_of)
        source, sample = prompts.source_of(request)
        rows.append(Row(prompts.name_of(source), source, sample, answer))
    return rows


def _copied(found: Answer) -> Answer:
    tokens = np.array(found.tokens, np.int32)
    return Answer(found.request, found.prompt_tokens, tokens, found.reason, found.text, found.error)


def _unanswered(request: int, batches: Batches, batch_of: np.ndarray) -> Answer:
    count = int(batches.lengths[request])
    if batch_of[request] >= 0:
        return Answer(request, count, (), PENDING)
    error = f"the prompt has {count} tokens and leaves no room for an answer"
    return Answer(request, count, (), TOO_LONG, error=error)


def _is_hdf5(path: Path) -> bool:
    try:
        return path.is_file() and read_head(path, len(MAGIC)) == MAGIC
    except OSError:
        return False
