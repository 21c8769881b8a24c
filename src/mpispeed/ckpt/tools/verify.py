"""`ckpt verify`: check of a checkpoint; lists all problems by file, tensor and range. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.base.units import format_list
from mpispeed.ckpt import digest
from mpispeed.ckpt.format import experts, hdf5, index, schema, tag_files, tags
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint
from mpispeed.ckpt.format.index import Index, TensorEntry
from mpispeed.ckpt.format.manifest import Manifest
from mpispeed.ckpt.read.reader import Opened, Reader
from mpispeed.ckpt.tools import scan
from mpispeed.ckpt.tools.scan import Segment
from mpispeed.ckpt.tools.show import split_location

#: problems of one checkpoint that are kept; more are counted
MOST_PROBLEMS = 1000
_SHOWN = 5
_CORRUPT, _INCOMPLETE = "corrupt", "incomplete"
#: what the second line of `latest` begins with
_DIGEST_MARK = "blake2b:"


@dataclass(frozen=True, slots=True)
class Problem:
    """A difference from the checkpoint as it was saved.

    Attributes:
        kind: "corrupt" or "incomplete".
        file: path of the file, relative to the folder of the tag.
        what: in words.
        name: parameter or buffer that the bytes belong to, "" for none.
        slot: its slot.
        first: first flat element of the range, -1 where no tensor is known.
        last: one past the last.
        offset: first byte in the file, -1 where it is not known.
    """

    kind: str
    file: str
    what: str
    name: str = ""
    slot: str = ""
    first: int = -1
    last: int = -1
    offset: int = -1

    def text(self) -> str:
        """One line."""
        if not self.name and not self.slot:
            return f"{self.file}: {self.what}"
        where = f"{self.name}/{self.slot}[{self.first}:{self.last}]"
        return f"{self.file}: {where} (flat elements, at byte {self.offset}) {self.what}"


@dataclass(slots=True)
class Report:
    """Result of a check.

    Attributes:
        problems: at most MOST_PROBLEMS of them.
        problem_count: their number.
        notes: harmless oddities.
        odd: (name, slot, NaN elements, infinite elements) of tensors that have some.
        digest: the logical digest, if it was asked for and nothing is wrong.

    Units:
        size_bytes: bytes of all files that were read.
    """

    path: Path
    tag: str
    uuid: str = ""
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0
    notes: list[str] = field(default_factory=list)
    odd: list[tuple[str, str, int, int]] = field(default_factory=list)
    digest: str = ""
    files: int = 0
    tensors: int = 0
    size_bytes: int = 0

    @property
    def status(self) -> str:
        """One word: "ok", "corrupt" or "incomplete"."""
        kinds = {problem.kind for problem in self.problems}
        return _CORRUPT if _CORRUPT in kinds else _INCOMPLETE if kinds else "ok"

    def add(self, file: str, what: str, kind: str = _CORRUPT, **place: Any) -> None:
        """Add a problem."""
        self.problem_count += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(Problem(kind, file, what, **place))

    def as_row(self) -> dict[str, Any]:
        """All of it as JSON values."""
        row = dataclasses.asdict(self)
        row["path"] = str(self.path)
        row["odd"] = [dict(zip(("name", "slot", "nan", "inf"), entry, strict=True)) for entry in self.odd]
        return {"status": self.status, **row}


def verify_location(location: str, *, quick: bool = False, wants_digest: bool = False) -> Report:
    """Check the checkpoint at "DIR" (its latest), "DIR:tag" or a tag's own folder. Arguments as `verify`.

    Raises:
        NoCheckpoint: no tag was given and there is no `latest`.
        TagNotFound: there is no such tag.
        CorruptCheckpoint: `latest` is damaged and no tag was given.
        CheckpointError: the format is newer, or a file may not be read.
    """
    folder, tag = split_location(location)
    if tag is None and (folder / schema.LATEST_FILE).exists() and not (folder / schema.MANIFEST_FILE).exists():
        tag = read_latest(folder)
    path, name = tags.resolve(folder, tag)
    return verify(path, name, quick=quick, wants_digest=wants_digest)


def verify_all(folder: Path, *, quick: bool = False, wants_digest: bool = False) -> list[Report]:
    """Check all checkpoints of a folder, oldest first; folders of unfinished saves are left out.

    Raises:
        NoCheckpoint: there is none.
        CheckpointError: the format is newer, or a file may not be read.
    """
    entries = tags.list_tags(folder) if folder.is_dir() else []
    found = [entry for entry in entries if entry.path.name == entry.tag]
    if not found:
        msg = f"{folder} is a folder without checkpoints" if folder.is_dir() else f"{folder} is no folder"
        raise NoCheckpoint(msg)
    return [verify(entry.path, entry.tag, quick=quick, wants_digest=wants_digest) for entry in found]


def verify(path: Path, tag: str, *, quick: bool = False, wants_digest: bool = False) -> Report:
    """Check one checkpoint; reads every byte of its files once, in bounded memory.

    Args:
        path: folder of the tag.
        tag: its name.
        quick: read the manifest, sizes and indices only.
        wants_digest: compute the logical digest too, which reads the elements once more.

    Raises:
        CheckpointError: the format is newer, or a file may not be read.
    """
    report = Report(path, tag)
    _check_latest(report)
    try:
        manifest = manifests.read(path)
    except IncompleteCheckpoint as failure:
        report.add(schema.MANIFEST_FILE, str(failure), _INCOMPLETE)
        return report
    except CorruptCheckpoint as failure:
        report.add(schema.MANIFEST_FILE, str(failure))
        return report
    report.uuid, report.files = manifest.uuid, len(manifest.files)
    if manifest.tag != tag:
        report.notes.append(f"it was saved as {manifest.tag!r}; its folder was renamed")
    usable = _check_sizes(report, manifest)
    found = _check_index(report, manifest, usable)
    tensors = list(found.tensors.values()) if found else []
    report.tensors = len(tensors)
    segments = _cover(report, manifest, usable, tensors)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(Reader(Opened(path, tag, manifest, found))) if found else None
        if not quick:
            _check_bytes(report, manifest, segments, reader)
            if schema.STATE_FILE in usable:
                _check_state(report, manifest)
        if reader and wants_digest and not report.problems:
            report.digest = digest.logical_digest(reader)
    return report


def read_latest(folder: Path) -> str | None:
    """As `tags.read_latest`, but a digest without its line break is not read as part of the tag.

    Raises:
        CorruptCheckpoint: it is damaged.
    """
    tag = tags.read_latest(folder)
    if tag is not None and _DIGEST_MARK in tag:
        msg = f"{folder / schema.LATEST_FILE} is damaged: tag and digest are not two lines; pass a tag"
        raise CorruptCheckpoint(msg)
    return tag


def _check_latest(report: Report) -> None:
    try:
        read_latest(report.path.parent)
    except CorruptCheckpoint as failure:
        report.add(f"../{schema.LATEST_FILE}", str(failure))


def _check_sizes(report: Report, manifest: Manifest) -> list[str]:
    """Compare sizes of files with the manifest; return the files that can be read."""
    usable = []
    for name, record in manifest.files.items():
        try:
            manifests.check_sizes(report.path, dataclasses.replace(manifest, files={name: record}))
            usable.append(name)
        except CorruptCheckpoint as failure:
            report.add(name, str(failure))
    for name in (schema.MODEL_FILE, schema.STATE_FILE):
        if name not in manifest.files:
            report.add(schema.MANIFEST_FILE, f"does not list {name}")
    lost = [file for file in manifest.data_files if file not in usable]
    if lost and schema.MODEL_FILE in usable:
        for file, names in _linked(report.path, manifest).items():
            if file in lost:
                report.add(file, f"it has the elements of {format_list(names, _SHOWN)}")
    listed = {schema.MANIFEST_FILE, *manifest.files}
    for found in sorted(report.path.rglob("*")):
        name = found.relative_to(report.path).as_posix()
        if name not in listed and not stat.S_ISDIR(found.lstat().st_mode):
            report.notes.append(f"{name} is no part of the checkpoint")
    return usable


def _linked(path: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Data file -> tensors whose links in model.h5 lead to it; empty where model.h5 cannot be trusted."""
    model, found = path / schema.MODEL_FILE, dict[str, list[str]]()
    if scan.index_checksum(model, manifest.files[schema.MODEL_FILE]) != manifest.files[schema.MODEL_FILE].index_crc32c:
        return found
    with index.translated(model), hdf5.open_reading(model) as file:
        homes = [(hdf5.child_group(file.id, schema.BUFFERS), "")]
        params = hdf5.child_group(file.id, schema.PARAMS)
        homes += [(hdf5.child_group(params, stored), f"{schema.unescape(stored)}/") for stored in hdf5.names(params)]
        for home, before in homes:
            for link in hdf5.names(home):
                target = hdf5.external_target(home, link)
                if target:
                    found.setdefault(target[0], []).append(before + schema.unescape(link))
    return found


def _check_index(report: Report, manifest: Manifest, usable: Sequence[str]) -> Index | None:
    """Compare the indices with their checksums and read them; None where they cannot be trusted."""
    with_tensors = [schema.MODEL_FILE, *manifest.data_files]
    is_trusted = all(name in usable for name in with_tensors)
    for name in with_tensors:
        record = manifest.files.get(name)
        if name in usable and record and scan.index_checksum(report.path / name, record) != record.index_crc32c:
            extents = [f"{start} to {start + length}" for start, length in record.index_extents]
            more = f" and {len(extents) - _SHOWN} more ranges" if len(extents) > _SHOWN else ""
            what = f"its index (names, attributes, offsets, checksums; bytes {', '.join(extents[:_SHOWN])}{more}) "
            report.add(name, f"{what}was altered: what it says of tensors is not used")
            is_trusted = False
    if not is_trusted:
        return None
    try:
        found = index.read_index(report.path, manifest.data_files)
    except CorruptCheckpoint as failure:
        report.add(schema.MODEL_FILE, str(failure))
        return None
    for what in (*manifests.strangeness(manifest, found.tag, found.global_step), *_contradictions(found)):
        report.add(schema.MODEL_FILE, what)
    return found


def _contradictions(found: Index) -> Iterator[str]:
    for alias, canonical in found.aliases.items():
        if canonical not in found.params:
            yield f"the alias {alias!r} is of {canonical!r}, which is no parameter"
        if alias in found.params or (alias, schema.BUFFER_SLOT) in found.tensors:
            yield f"the alias {alias!r} is the name of a tensor as well"
    stored = {name for name, slot in found.tensors if slot != schema.BUFFER_SLOT}
    for name in found.params:
        if name not in stored:
            yield f"nothing is stored of the parameter {name!r}"
    yield from experts.faults(found.params)


def _cover(
    report: Report, manifest: Manifest, usable: Sequence[str], tensors: Sequence[TensorEntry]
) -> dict[str, list[Segment]]:
    """Divide all files into segments; index and tensors have to cover each file exactly once."""
    made = {}
    for name in usable:
        own = [tensor for tensor in tensors if tensor.file == name]
        made[name], problems = scan.segments_of(manifest.files[name], own)
        for what in problems:
            report.add(name, what)
    for what in _table_problems(manifest, tensors):
        report.add(schema.MODEL_FILE, what)
    return made


def _table_problems(manifest: Manifest, tensors: Sequence[TensorEntry]) -> Iterator[str]:
    """Problems of checksum tables that are outside of the index of model.h5 or overlap."""
    filled = sorted((tensor for tensor in tensors if tensor.size_bytes), key=lambda tensor: tensor.table_offset)
    extents = sorted(manifest.files[schema.MODEL_FILE].index_extents) if filled else []
    starts, position = np.array([start for start, _ in extents], np.int64), 0
    for tensor in filled:
        first = tensor.table_offset
        last = first + schema.block_count(tensor.size_bytes) * index.TABLE_DTYPE.itemsize
        at = int(np.searchsorted(starts, first, "right")) - 1
        if at < 0 or last > sum(extents[at]):
            yield f"the checksums of {tensor.name}/{tensor.slot} do not lie in the index"
        elif first < position:
            yield f"the checksums of {tensor.name}/{tensor.slot} overlap others"
        position = max(position, last)


def _check_bytes(
    report: Report, manifest: Manifest, segments: Mapping[str, Sequence[Segment]], reader: Reader | None
) -> None:
    """Read everything once and compare it with the checksums of the blocks and of the whole files."""
    scan.scan(report.path, segments)
    for name, own in segments.items():
        record, before, whole = manifest.files[name], report.problem_count, 0
        for segment in own:
            whole = segment.checksum(whole)
            _check_segment(report, name, segment, reader)
            if segment.tensor and (segment.nan or segment.infinite):
                report.odd.append((segment.tensor.name, segment.tensor.slot, segment.nan, segment.infinite))
        report.size_bytes += record.bytes
        if whole != record.crc32c and report.problem_count == before and not _is_named(report, name):
            report.add(name, f"it does not match its checksum in {schema.MANIFEST_FILE}")


def _is_named(report: Report, file: str) -> bool:
    return any(problem.file == file for problem in report.problems)


def _check_segment(report: Report, file: str, segment: Segment, reader: Reader | None) -> None:
    """Add the damaged blocks of a segment to the report; neighbours as one range."""
    tensor, bad = segment.tensor, dict(segment.failures)
    if tensor is not None and reader is not None:
        for number in np.flatnonzero(reader.table(tensor) != segment.crcs).tolist():
            bad.setdefault(number, "does not match its checksum")
    for first, last, what in _runs(bad):
        offset, stop = segment.block(first)[0], sum(segment.block(last))
        if tensor is None:
            report.add(file, f"{segment.label} (bytes {offset} to {stop}) {what}", offset=offset)
            continue
        items = [(place - segment.start) // tensor.itemsize for place in (offset, stop)]
        report.add(file, what, name=tensor.name, slot=tensor.slot, first=items[0], last=items[1], offset=offset)


def _runs(bad: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """First block, last block and words of runs of neighbours with the same words."""
    run: tuple[int, int, str] | None = None
    for number, what in sorted(bad.items()):
        if run and run[1] + 1 == number and run[2] == what:
            run = (run[0], number, what)
            continue
        if run:
            yield run
        run = (number, number, what)
    if run:
        yield run


def _check_state(report: Report, manifest: Manifest) -> None:
    """Check that an undamaged state.h5 can be read and belongs to the tag."""
    if _is_named(report, schema.STATE_FILE):
        return
    path = report.path / schema.STATE_FILE
    try:
        raw = path.read_bytes()
        tag_files.decode_state(path, raw, lambda array, dtype: (dtype, array.shape))
        content = tag_files.decode_content(path, raw)
    except CorruptCheckpoint as failure:
        report.add(schema.STATE_FILE, str(failure))
        return
    for what in manifests.strangeness(manifest, content.tag, content.global_step):
        report.add(schema.STATE_FILE, what)
