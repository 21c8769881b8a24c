"""The state of a job as its file of results or its work folder shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.base.plain import printable, read_plain
from mpispeed.ckpt.format import kinds
from mpispeed.generation.answers import ERROR, PENDING, REASONS, TOO_LONG
from mpispeed.generation.finished import scan
from mpispeed.generation.hdf5_tables import Table, Tables
from mpispeed.generation.identity import ANSWERED_FILE, OtherJob, read
from mpispeed.generation.result_files import read_identity

_MOST_ANSWERED_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Shown:
    """The state of a job.

    Attributes:
        path: that was looked at.
        what: "results", "lines of results" or "work folder".
        requests: answers that are wanted; of lines of JSON, as many as there are.
        reasons: answers by reason, without those that are 0.
        tokens: new tokens.
        prompt_tokens: tokens of the prompts that were answered.
        batches: how many are done, and of how many; (0, 0) where it is not known.
        seconds: that the batches took, added up over groups; 0 where it is not known.
        settings: of the job.
        notes: one sentence for each file of a work folder that is of no use.
    """

    path: Path
    what: str
    requests: int
    reasons: Mapping[str, int]
    tokens: int = 0
    prompt_tokens: int = 0
    batches: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """Requests that are dealt with, also those that failed."""
        return self.requests - self.left

    @property
    def left(self) -> int:
        """Requests that are still to be answered."""
        return self.reasons.get(REASONS[PENDING], 0)

    @property
    def failed(self) -> int:
        """Requests that have no answer, and will not have one."""
        return self.reasons.get(REASONS[ERROR], 0) + self.reasons.get(REASONS[TOO_LONG], 0)

    def lines(self) -> list[str]:
        """All of it as lines of text."""
        reasons = ", ".join(f"{name} {count}" for name, count in self.reasons.items()) or "none"
        found = [
            f"{self.path}: {self.what}",
            f"requests   {self.requests}: {self.done} done, {self.left} left, {self.failed} failed",
            f"reasons    {reasons}",
            f"tokens     {self.tokens} new, {self.prompt_tokens} of prompts",
        ]
        if self.batches[1]:
            found.append(f"batches    {self.batches[0]} of {self.batches[1]} done")
        if self.seconds:
            found.append(f"speed      {self.tokens / self.seconds:.1f} new tokens per second and group")
        if self.settings:
            settings = (f"{name}={printable(json.dumps(value), 80)}" for name, value in sorted(self.settings.items()))
            found.append(f"settings   {', '.join(settings)}")
        return found + [f"note       {note}" for note in self.notes]


def show(path: Path) -> Shown:
    """Look at a file of results (HDF5 or lines of JSON) or a work folder; nothing is changed.

    For the work folder of a job that has written its results, these are looked at.

    Raises:
        OtherJob: it is none of these.
        WorkError: a work folder cannot be read.
    """
    if path.is_dir():
        return _folder(path)
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not path.is_file():
                msg = "it is no ordinary file"
                raise OSError(msg)  # noqa: TRY301 - joins what the system says
            is_hdf5 = file.read(4) == b"\x89HDF"
            file.seek(0)
            return _tables(path, file.fileno()) if is_hdf5 else _lines(path, file)
    except (OSError, ValueError, KeyError, RuntimeError) as failure:
        if isinstance(failure, OtherJob):
            raise
        text = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure
        msg = f"{path} has no results that can be read: {printable(str(text), 300)}"
        raise OtherJob(msg) from failure


def _folder(path: Path) -> Shown:
    identity = read(path)
    if (path / ANSWERED_FILE).exists():
        return show(_results_of(path / ANSWERED_FILE))
    found = scan(path, identity)
    reasons = found.reasons.copy()
    reasons[TOO_LONG] += identity.left_out
    reasons[PENDING] = identity.requests - int(reasons.sum())
    return Shown(
        path,
        "work folder",
        identity.requests,
        _by_name(reasons),
        found.tokens,
        found.prompt_tokens,
        (int(found.done.sum()), identity.count),
        found.seconds,
        identity.settings,
        tuple(found.notes),
    )


def _results_of(path: Path) -> Path:
    """The first file of results of a job that has written them, or the first that is still there."""
    try:
        value = json.loads(read_plain(path, _MOST_ANSWERED_BYTES))
        results = [Path(each) for each in value["results"]]
        there = [each for each in results if each.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as failure:
        msg = f"{path} does not name the results of this job ({printable(repr(failure), 100)})"
        raise OtherJob(msg) from failure
    if not there:
        msg = f"all requests of {path.parent} were answered, and {', '.join(map(str, results))} is not there any more"
        raise OtherJob(msg)
    return there[0]


def _tables(path: Path, handle: int) -> Shown:
    identity, _ = read_identity(path)
    with kinds.opened(path) as opened:
        tables = Tables(handle, os.fstat(handle).st_size, opened)
        reasons, offsets, prompts = (
            tables.table(tables.root, name) for name in ("finish_reason", "offsets", "prompt_tokens")
        )
    codes = _numbers(reasons, identity.requests, "|u1")
    cuts = _numbers(offsets, identity.requests + 1, "<i8")
    counts = _numbers(prompts, identity.requests, "<i4")
    if len(codes) and int(codes.max()) >= len(REASONS):
        msg = f"finish_reason has the code {codes.max()}"
        raise ValueError(msg)
    return Shown(
        path,
        "results",
        identity.requests,
        _by_name(np.bincount(codes, minlength=len(REASONS))),
        int(cuts[-1]),
        int(counts[codes != PENDING].sum(dtype=np.int64)),
        settings=identity.settings,
    )


def _numbers(table: Table, count: int, dtype: str) -> np.ndarray:
    if table.count != count or table.dtype != np.dtype(dtype):
        msg = f"{table.name} has {table.count} elements of type {table.dtype}; expected {count} of {dtype}"
        raise ValueError(msg)
    return table.read()


def _lines(path: Path, file: Any) -> Shown:
    counts: dict[str, int] = {}
    tokens = prompt_tokens = requests = 0
    while raw := file.readline(_MOST_LINE_BYTES):
        try:
            line = json.loads(raw)
            reason = line["finish_reason"]
            tokens, prompt_tokens = tokens + int(line["new_tokens"]), prompt_tokens + int(line["prompt_tokens"])
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            msg = f"line {requests + 1} is no answer ({failure!r:.80})"
            raise ValueError(msg) from None
        if reason not in REASONS:
            msg = f"line {requests + 1} has the finish_reason {reason!r:.40}"
            raise ValueError(msg)
        counts[reason], requests = counts.get(reason, 0) + 1, requests + 1
    return Shown(path, "lines of results", requests, counts, tokens, prompt_tokens)


def _by_name(reasons: np.ndarray) -> dict[str, int]:
    return {REASONS[code]: int(count) for code, count in enumerate(reasons.tolist()) if count}
