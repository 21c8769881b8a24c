"""The records of one run: the files of its jobs, in the order of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.record import layout
from mpispeed.record.errors import NoRecord, RecordError
from mpispeed.record.reader import Record, open_record
from mpispeed.record.series import Points, SeriesInfo, SeriesTable

STEP_SECONDS = "Step/seconds"
"""The series that has a point for each step of a job."""
_MOST_FILES = 10_000


class Run:
    """Records of the jobs of one run, as one.

    A job that goes on from a checkpoint does some steps of its predecessor once more: the later ones count.

    Attributes:
        records: the files, by the time at which their jobs started; at least one.
        names: of series and spans of all files.
        written: rows of all files in this order, with numbers of `names`.
        rows: those of them that count.
        unread: a sentence for each file that could not be read.
    """

    def __init__(self, records: Sequence[Record], unread: Sequence[str] = ()) -> None:
        self.records = tuple(sorted(records, key=lambda record: (record.started, record.path.name)))
        self.unread = tuple(unread)
        numbers: dict[str, int] = {}
        for record in self.records:
            for name in record.names:
                numbers.setdefault(name, len(numbers))
        self.names = tuple(numbers)
        places = [np.array([numbers[name] for name in record.names], np.uint32) for record in self.records]
        parts = [_numbered(record.rows, own, "series") for record, own in zip(self.records, places, strict=True)]
        self.written = np.concatenate(parts)
        self.rows = np.concatenate(_counting(parts, numbers.get(STEP_SECONDS)))
        self._table = SeriesTable(self.names, self.rows)
        self._spans = [
            _numbered(_numbered(record.spans(), own, "name"), own, "lane")
            for record, own in zip(self.records, places, strict=True)
        ]

    @property
    def last(self) -> Record:
        """The record of the last job."""
        return self.records[-1]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the last job."""
        return self.last.facts

    @property
    def lost(self) -> list[str]:
        """What is missing or damaged, one sentence for each file."""
        return [f"{record.path}: {record.lost}" for record in self.records if record.lost] + list(self.unread)

    def series(self) -> list[SeriesInfo]:
        """All series that have points that count."""
        return self._table.series()

    def points(self, name: str, rank: int = 0) -> Points:
        """The points that count of one series on one rank. Raises KeyError as `SeriesTable.points`."""
        return self._table.points(name, rank)

    def notes(self) -> list[dict[str, Any]]:
        """What happened, job by job."""
        return [note for record in self.records for note in record.notes()]

    def spans(self) -> np.ndarray:
        """Spans of all jobs; names and lanes are places in `names`."""
        return np.concatenate(self._spans)


def open_run(sources: Sequence[Path]) -> Run:
    """Read the records of a run: files, or folders with the files of their jobs.

    A file of a folder that is damaged is left out, and said so, if another can be read; so are symbolic links there,
    files that are something else, and the jobs of other runs than the one whose job was started last.

    Raises:
        NoRecord: there is none.
        RecordError: a file that was named cannot be read, or none of a folder can.
    """
    records, unread = [], []
    for source in sources:
        if source.is_dir():
            own, failures = _of_folder(source)
            kept, strangers = _of_one_run(own)
            records += kept
            unread += [str(failure) for failure in failures]
            if strangers:
                names = ", ".join(record.path.name for record in strangers)
                unread.append(f"{source} has records of other runs, which are left out unless they are named: {names}")
        else:
            records.append(open_record(source))
    kept, copies = _without_copies(records)
    return Run(kept, [*unread, *copies])


def _of_one_run(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Records of the run that the last job belongs to, and those of others.

    Jobs are of one run if notes lead from both to the same first job. A job that began anew is a run of its own.
    """
    before = {record.run: _followed(record) for record in records if record.run}

    def first(record: Record) -> str:
        name, seen = record.run or str(record.path), set[str]()
        while before.get(name) and name not in seen:
            seen.add(name)
            name = before[name]
        return name

    last = first(max(records, key=lambda record: (record.started, record.path.name)))
    kept = [record for record in records if first(record) == last]
    return kept, [record for record in records if record not in kept]


def _followed(record: Record) -> str:
    """The run id of the record that this one follows, "" if it follows none."""
    ids = [note.get("run") for note in record.notes() if note["kind"] == "follows"]
    return next((name for name in ids if isinstance(name, str) and name != record.run), "")


def _without_copies(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """One record of each job, the fullest, and a sentence for each other file that has it, too."""
    kept: dict[str, Record] = {}
    copies = []
    for record in records:
        name = record.run or str(record.path)
        known = kept.setdefault(name, record)
        if known is record:
            continue
        kept[name] = record if len(record.rows) > len(known.rows) else known
        if known.path.resolve() != record.path.resolve():
            other = known if kept[name] is record else record
            copies.append(f"{other.path} has the same job as {kept[name].path}, and is left out")
    return list(kept.values()), copies


def _of_folder(folder: Path) -> tuple[list[Record], list[RecordError]]:
    records, failures = [], []
    for path in find_records(folder):
        try:
            records.append(open_record(path))
        except NoRecord:
            continue  # something else with this suffix
        except RecordError as failure:
            failures.append(failure)
    if not records and failures:
        raise failures[0]
    if not records:
        msg = f"{folder} has no run record; a run writes one there with run_record.enabled in its config"
        raise NoRecord(msg)
    return records, failures


def find_records(folder: Path) -> list[Path]:
    """Files of a folder, not of those in it, that may be run records, by name.

    Raises:
        RecordError: the folder cannot be read, or has very many.
    """
    try:
        found = sorted(
            path
            for path in folder.iterdir()
            if path.suffix == layout.SUFFIX and not path.name.startswith(".") and path.is_file()
            if not path.is_symlink()
        )
    except OSError as failure:
        msg = f"{folder} cannot be read: {failure.strerror}"
        raise RecordError(msg) from failure
    if len(found) > _MOST_FILES:
        msg = f"{folder} has {len(found)} files that may be run records; name those that are meant"
        raise RecordError(msg)
    return found


def _numbered(rows: np.ndarray, places: np.ndarray, field: str) -> np.ndarray:
    """Rows with other numbers of names."""
    found = rows.copy()
    if len(rows):
        found[field] = places[rows[field]]
    return found


def _counting(parts: Sequence[np.ndarray], of_steps: int | None) -> list[np.ndarray]:
    """Rows of each job of steps that no later one did again; `of_steps` is the series with a point for each step."""
    found: list[np.ndarray] = []
    first = None
    for rows in reversed(parts):
        found.append(rows if first is None else rows[rows["step"] < first])
        # What a job measures before its first step has the number of the last step before it, or none.
        done = rows["series"] == of_steps
        steps = rows["step"][done if done.any() else rows["step"] > 0]
        if len(steps):
            own = int(steps.min())
            first = own if first is None else min(first, own)
    return found[::-1]
