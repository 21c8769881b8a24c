"""`ckpt reshape`: a copy of a checkpoint with its elements in another number of files."""

from __future__ import annotations

import datetime
import shutil
import uuid as uuids
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.files import sync_folder
from mpispeed.base.units import format_bytes
from mpispeed.ckpt import digest
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import payload, schema, tag_files, tags
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.format.index import plain_record
from mpispeed.ckpt.format.logical import LogicalTensor
from mpispeed.ckpt.format.manifest import FileRecord, Manifest
from mpispeed.ckpt.format.payload import OpenFiles
from mpispeed.ckpt.format.tag_files import Places
from mpispeed.ckpt.read.reader import Reader, open_reader

_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReshapeReport:
    """Result of a reshape.

    Attributes:
        path: folder of the new tag.
        files: number of files with elements; at most that of parameters and buffers.
        digest: logical digest of both checkpoints.

    Units:
        size_bytes: bytes of all files of the copy.
    """

    path: Path
    tag: str
    files: int
    size_bytes: int
    digest: str


def reshape(reader: Reader, folder: Path, *, files: int, overwrite: bool = False) -> ReshapeReport:
    """Copy a checkpoint to `folder` under its own tag, with its elements in `files` files.

    model.h5 and the data files become those that a save with that many files would have written. The state is copied
    as it is. The copy appears once its elements were read back and have the digest of the original; `latest` is
    written if `folder` has none.

    Args:
        reader: the checkpoint to copy.
        folder: folder of checkpoints to copy it to; made if missing.
        files: how many files hold elements.
        overwrite: replace the tag in `folder`, which may be the original itself.

    Raises:
        CheckpointError: the tag exists, or there is no room.
        CorruptCheckpoint: the original is damaged, or the copy is not equal to it.
        OSError: the file system refuses.
    """
    if files < 1:
        msg = f"a checkpoint cannot be cut into {files} files; ask for at least 1"
        raise CheckpointError(msg)
    tag, uuid = tags.check_tag(reader.manifest.tag), uuids.uuid4().hex
    work, final = folder / f".{tag}.tmp-{uuid}", folder / tag
    tags.refuse_taken(final, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(reader, folder)
    work.mkdir()
    try:
        places, text = _fill(reader, work, files)
        manifest = _write_manifest(reader, work, places, uuid)
        _compare(reader, work, text)
        tags.publish(work, final, uuid, overwrite=overwrite)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if not (folder / schema.LATEST_FILE).exists():
        tags.write_latest(folder, tag, uuid)
    return ReshapeReport(final, tag, len(places.files), manifest.size_bytes, text)


def _fill(reader: Reader, work: Path, files: int) -> tuple[Places, str]:
    """Lay the files out, copy elements, checksums and state; return the places and the digest of the elements."""
    stored = digest.in_order(reader.tensors())
    tensors = [LogicalTensor(tensor.name, tensor.slot, tensor.shape, tensor.dtype) for tensor in stored]
    places = tag_files.create(
        work,
        tag=reader.manifest.tag,
        global_step=reader.global_step,
        params=[reader.info(name) for name in reader.names()],
        tensors=tensors,
        aliases=reader.aliases(),
        files=files,
    )
    seen = digest.LogicalDigest()
    with OpenFiles(work, places.files) as targets:
        for number, tensor in enumerate(stored):
            seen.begin(tensor)
            position = int(places.data[number])
            for part in reader.chunks(tensor):
                data = part.data.cast("B")
                seen.update(data)
                targets.write(int(places.which[number]), data, position, f"{tensor.name}/{tensor.slot}")
                targets.settle()  # the memory of this part is used for the next
                position += len(data)
        targets.sync()
    # the elements were compared with these checksums as they were read
    payload.write_tables(work / schema.MODEL_FILE, places, _tables(reader))
    shutil.copyfile(reader.path / schema.STATE_FILE, work / schema.STATE_FILE, follow_symlinks=False)
    manifests.sync_file(work / schema.STATE_FILE)
    return places, seen.text()


def _tables(reader: Reader) -> list[np.ndarray]:
    return [reader.table(tensor) for tensor in digest.in_order(reader.tensors())]


def _write_manifest(reader: Reader, work: Path, places: Places, uuid: str) -> Manifest:
    contents: dict[str, list[tuple[int, int, np.ndarray]]] = {schema.MODEL_FILE: []}
    stored = digest.in_order(reader.tensors())
    rows = zip(stored, places.which.tolist(), places.data.tolist(), _tables(reader), strict=True)
    for tensor, which, offset, table in rows:
        if tensor.size_bytes:
            contents.setdefault(places.files[which], []).append((offset, tensor.size_bytes, table))
    files = {name: payload.file_record(work / name, held) for name, held in sorted(contents.items())}
    files[schema.STATE_FILE] = _state_record(reader, work)
    manifest = Manifest(
        tag=reader.manifest.tag,
        global_step=reader.global_step,
        serial=manifests.next_serial(tags.last_serial(work.parent)),
        uuid=uuid,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
        layout=reader.layout,
        files=files,
    )
    for folder in {(work / name).parent for name in files} - {work}:
        sync_folder(folder)
    manifests.write(work, manifest)
    return manifest


def _state_record(reader: Reader, work: Path) -> FileRecord:
    record = plain_record(work / schema.STATE_FILE)
    if record != reader.manifest.files.get(schema.STATE_FILE):
        msg = f"{reader.path / schema.STATE_FILE} is damaged: it does not match the checksum in {schema.MANIFEST_FILE}"
        raise CorruptCheckpoint(msg)
    return record


def _compare(reader: Reader, work: Path, expected: str) -> None:
    """Read the copy back and compare its elements and index with the original."""
    with open_reader(work) as copy:
        is_same = copy.index.params == reader.index.params and copy.index.aliases == reader.index.aliases
        if not is_same or digest.logical_digest(copy) != expected:
            msg = f"the copy of {reader.path} that was written to {work.parent} is not equal to it; it was removed"
            raise CorruptCheckpoint(msg)


def _check_room(reader: Reader, folder: Path) -> None:
    needed = reader.manifest.size_bytes + _SLACK_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        msg = f"{folder} has {format_bytes(free)} free, the copy needs about {format_bytes(needed)}; make room"
        raise CheckpointError(msg)
