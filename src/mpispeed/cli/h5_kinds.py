"""The kinds of files that `mpispeed h5` knows, each with its description and its check. Neither torch nor MPI."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpispeed.base.errors import MpispeedError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.format import kinds, schema
from mpispeed.ckpt.tools import one_file, weight_files
from mpispeed.ckpt.tools import verify as checkpoints
from mpispeed.generation import result_files
from mpispeed.record import layout as record_layout
from mpispeed.tokens import layout as token_layout

OK, DAMAGED, UNFINISHED, UNKNOWN = "ok", "damaged", "unfinished", "unknown"

_MOST_SERIES = 200
_LONG = ("config", "started", "host", "run", "saved_by")
"""Left out where there is one line."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check.

    Attributes:
        status: "ok", "damaged", "unfinished", or "unknown" where there is nothing to compare with.
        said: what was compared.
        problems: a sentence for each.
    """

    status: str
    said: str
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        title: for people.
        known: the version that this mpispeed reads.
        describe: values of JSON that tell what is in a file.
        verify: a check of a file; the second argument: without its elements.
        see: the command that shows more.
    """

    title: str
    known: kinds.Version
    describe: Callable[[Path], dict[str, Any]]
    verify: Callable[[Path, bool], Verdict]
    see: str


def _verify_checkpoint(path: Path, is_quick: bool) -> Verdict:
    folder = one_file.tag_folder(path)
    report = checkpoints.verify(folder, folder.name, quick=is_quick)
    status = {"ok": OK, "corrupt": DAMAGED, "incomplete": UNFINISHED}[report.status]
    problems = [problem.text() for problem in report.problems]
    if report.problem_count > len(problems):
        problems.append(f"and {report.problem_count - len(problems)} more")
    read = "no elements read" if is_quick else f"{format_bytes(report.size_bytes)} read"
    return Verdict(
        status, f"the checkpoint {report.tag}: {report.files} files, {report.tensors} tensors, {read}", problems
    )


def _describe_record(path: Path) -> dict[str, Any]:
    from mpispeed.record.reader import open_record
    from mpispeed.record.runs import Run
    from mpispeed.record.summary import strict, summary

    record = open_record(path)
    found = summary(Run([record]), time.time())
    series = [
        {name: row[name] for name in ("series", "ranks", "points", "first", "last", "min", "max")}
        for row in found["series"][:_MOST_SERIES]
    ]
    told = {"run": record.run, "host": record.host, "started": record.started, "state": found["said"]}
    told |= {"steps": found["steps"], "samples": found["samples"], "lost": record.lost, "facts": dict(record.facts)}
    plain: dict[str, Any] = strict({**told, "series": series})
    return plain


def _verify_record(path: Path, _: bool) -> Verdict:
    from mpispeed.record.reader import open_record

    record = open_record(path)
    said = f"{len(record.facts)} facts, {len(record.rows)} points, {len(record.spans())} spans, "
    said += f"{len(record.notes())} notes"
    # a run that was killed leaves a record without an end, in which all is proven that was flushed
    end = "" if record.is_ended else "; its writer has not closed it, or not yet"
    return Verdict(DAMAGED if record.lost else OK, said + end, [record.lost] if record.lost else [])


def _describe_tokens(path: Path) -> dict[str, Any]:
    from mpispeed.tokens.reader import contents_of

    found = contents_of(path)
    places = found.places
    told = {"tokens": places.token_count, "documents": places.document_count, "rows": places.row_count}
    columns = {name: place.dtype for name, place in places.columns.items()}
    return {**told, "dtype": places.dtype, "columns": columns, "facts": dict(found.manifest.facts)}


def _verify_tokens(path: Path, is_quick: bool) -> Verdict:
    from mpispeed.tokens.errors import UnfinishedStore
    from mpispeed.tokens.reader import contents_of
    from mpispeed.tokens.verify import verify

    try:
        if is_quick:
            contents_of(path)
            return Verdict(OK, "layout and manifest; no elements read")
        found = verify(path, threads=len(os.sched_getaffinity(0)))
    except UnfinishedStore as failure:
        return Verdict(UNFINISHED, "layout and manifest", [str(failure)])
    said = f"{found.blocks} of {found.all_blocks} blocks ({format_bytes(found.nbytes)})"
    return Verdict(OK if found.is_fine else DAMAGED, said, found.problems)


def _describe_results(path: Path) -> dict[str, Any]:
    from mpispeed.generation.result_check import check

    found = check(path, is_quick=True)
    return {"requests": found.requests, "answered": found.answered, "settings": found.settings}


def _verify_results(path: Path, is_quick: bool) -> Verdict:
    from mpispeed.generation.result_check import check

    found = check(path, is_quick=is_quick)
    said = f"{found.answered} of {found.requests} answers; tables fit each other (such files have no checksums)"
    if is_quick:
        said = "the job's identity against its digest; tables not read"
    return Verdict(DAMAGED if found.problems else OK, said, found.problems)


def _verify_weights(path: Path, _: bool) -> Verdict:
    found = one_file.describe_weights(path)
    said = f"{found['tensors']} tensors, shapes and types (such files have no checksums: elements not read)"
    return Verdict(OK, said)


KINDS: Mapping[str, FileKind] = MappingProxyType(
    {
        schema.FORMAT: FileKind(
            "checkpoint", schema.VERSION, one_file.describe, _verify_checkpoint, "mpispeed ckpt show"
        ),
        schema.DATA_FORMAT: FileKind(
            "checkpoint data", schema.VERSION, one_file.describe, _verify_checkpoint, "mpispeed ckpt show"
        ),
        record_layout.FORMAT: FileKind(
            "run record", (record_layout.VERSION, 0), _describe_record, _verify_record, "mpispeed logs record show"
        ),
        token_layout.FORMAT: FileKind(
            "token store", (token_layout.VERSION, 0), _describe_tokens, _verify_tokens, "mpispeed data show"
        ),
        result_files.FORMAT: FileKind(
            "results of generate",
            (result_files.VERSION, 0),
            _describe_results,
            _verify_results,
            "mpispeed generate --show",
        ),
        weight_files.HDF5_FORMAT: FileKind(
            "weights", weight_files.HDF5_VERSION, one_file.describe_weights, _verify_weights, "mpispeed ckpt show"
        ),
    }
)
"""By the attribute `format` of the root."""


@dataclass(frozen=True)
class Found:
    """A file that was looked at.

    Attributes:
        kind: None for HDF5 files of other programs, and where `refusal` is not empty.
        form: what the file says that it is.
        version: as text; "" if there is none.
        refusal: why its contents are not looked at, though it is one of ours; "" for most.
        warning: what is to be said of its version; "" for most.
    """

    path: Path
    kind: FileKind | None
    form: str
    version: str
    refusal: str = ""
    warning: str = ""

    @property
    def title(self) -> str:
        """The kind in words."""
        known = KINDS.get(self.form)
        return known.title if known else "HDF5 of another program"


def find(path: Path) -> Found:
    """Tell what a file is, by the attributes of its root.

    Raises:
        CheckpointError: it cannot be read, or is no HDF5 file.
    """
    told = kinds.kind_of(path)
    kind = KINDS.get(told.form)
    version = told.version
    if version is None and told.form == result_files.FORMAT:  # files of the first days
        version = (result_files.VERSION, 0)
    text = kinds.shown(version) if version else ""
    if kind is None:
        return Found(path, None, told.form, text)
    if why := kinds.refusal(version, kind.known):
        return Found(path, None, told.form, text, f"{path} is a file ({kind.title}) {why}")
    warning = kinds.warning(version, kind.known) if version else ""
    return Found(path, kind, told.form, text, "", f"{path} is a file ({kind.title}) {warning}" if warning else "")


def shared_folder(found: Found) -> Path | None:
    """The folder whose files are verified together; None for a file by itself."""
    return one_file.tag_folder(found.path) if found.form in (schema.FORMAT, schema.DATA_FORMAT) else None


def described(found: Found) -> dict[str, Any]:
    """What is in a file, as values of JSON; with the key `problem` where that cannot be read."""
    if found.kind is None:
        return {"problem": found.refusal} if found.refusal else {}
    try:
        return found.kind.describe(found.path)
    except (MpispeedError, OSError) as failure:
        return {"problem": str(failure)}


def in_short(told: Mapping[str, Any]) -> str:
    """One line of what `described` gives: its numbers and short texts."""
    if "problem" in told:
        return str(told["problem"])
    parts = [
        f"{name} {value}"
        for name, value in told.items()
        if isinstance(value, (int, str)) and not isinstance(value, bool) and name not in _LONG
    ]
    return ", ".join(parts)


def as_lines(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of what `described` gives, without tables of series."""
    lines = []
    for name, value in told.items():
        if name == "series" or value is None:
            continue
        if isinstance(value, Mapping):
            lines += [(f"{name}.{key}", _text(one)) for key, one in value.items()]
        else:
            lines.append((name, _text(value)))
    return lines


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else json.dumps(value)
