"""Saving: rank 0 lays the files out, ranks write the elements, and the tag is published atomically."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.base.files import sync_folder
from mpispeed.ckpt.format import logical, payload, schema, tag_files, tags
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format.errors import PLAIN, SaveFailed
from mpispeed.ckpt.format.index import plain_record
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo
from mpispeed.ckpt.format.manifest import Manifest
from mpispeed.ckpt.format.tag_files import Places
from mpispeed.ckpt.node_local import copies
from mpispeed.ckpt.write import two_phase, work_folder
from mpispeed.ckpt.write.request import Ranks, Request, SaveOptions, check_replicas, compare, prepare
from mpispeed.ckpt.write.work_folder import Ticket, begin, discarded_on_failure, lay_out

if TYPE_CHECKING:
    from mpispeed.ckpt.format.saving_comm import SavingComm
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

__all__ = ["SaveOptions", "SaveReport", "carry_out", "prepare", "save"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Result of a save; the same on every rank except for the seconds.

    Attributes:
        files: number of files with elements.
        is_direct: every rank wrote its own pieces, except of tensors in too many small pieces.

    Units:
        size_bytes: bytes of all files; seconds: wall time of this rank.
    """

    path: Path
    tag: str
    uuid: str
    size_bytes: int
    seconds: float
    files: int
    is_direct: bool


def save(
    comm: Comm,
    folder: str | Path,
    tag: str,
    *,
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
    config_json: str = "{}",
    rng: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Write one checkpoint.

    Every rank passes the same `params` and the same names, slots, shapes and dtypes in `tensors`, in
    the same order, and only its own pieces. Folder, tag, state, config, layout and options are rank
    0's; with `SaveOptions(node_local=True)` the folder is each rank's own.
    `state["engine"]["global_steps"]`, if there, becomes the step of the checkpoint.

    Args:
        comm: all ranks that hold a part of the state.
        folder: where checkpoints live; made if missing.
        tag: name of this checkpoint.
        params: attributes of the parameters.
        tensors: datasets and this rank's pieces of them.
        aliases: alias -> canonical name of tied parameters.
        state: a tree of plain values, arrays and tensors; the top-level name "rng" is taken.
        config_json: the configuration as used.
        rng: generator kind -> state of this rank's generator (bytes, uint8 array or uint8 tensor).
        layout: sizes of the axes and the like, as JSON values; recorded, not used.
        options: how to save.

    Collective over: comm.

    Raises:
        UnsupportedValue: the state holds an object without a place in the format; nothing was written.
        SaveFailed: anything else, on every rank; the previous checkpoints are untouched.
    """
    request = prepare(
        comm,
        folder,
        tag,
        params=params,
        tensors=tensors,
        aliases=aliases,
        state=state,
        config_json=config_json,
        rng=rng,
        layout=layout,
        options=options,
    )
    return carry_out(comm, request)


def carry_out(comm: SavingComm, request: Request) -> SaveReport:
    """Write a prepared request.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank; the previous checkpoints are untouched.
    """
    started = time.monotonic()
    ranks = compare(comm, request)
    check_replicas(comm, request, ranks)
    ticket = begin(comm, request, ranks)
    with discarded_on_failure(ticket):
        is_copied = len(ticket.owners) > 1
        is_direct = not is_copied and work_folder.is_direct(comm, request, ranks, ticket.work)
        files = request.options.files or (1 if is_direct or is_copied else len(ranks.leaders))
        places = lay_out(comm, request, ticket, files)
        if is_direct:
            segments = _write_direct(comm, request, ticket, places, ranks)
        elif is_copied:
            segments = _write_dealt(comm, request, ticket, places, ranks)
        else:
            segments = _write_files(comm, request, ticket, places, ranks)
        size_bytes = _finish(comm, request, ticket, places, segments)
        if is_copied:
            _copy(comm, request, ticket, places)
    _publish(comm, request, ticket)
    return SaveReport(
        path=ticket.final,
        tag=ticket.tag,
        uuid=ticket.uuid,
        size_bytes=size_bytes,
        seconds=time.monotonic() - started,
        files=len(places.files),
        is_direct=is_direct,
    )


def _write_files(comm: SavingComm, request: Request, ticket: Ticket, places: Places, ranks: Ranks) -> np.ndarray:
    """One rank per file writes: one per node, or as far apart as can be. Collective over: comm."""
    count, leaders = len(places.files), ranks.leaders
    writers = leaders if count == len(leaders) else [file * comm.size // count for file in range(count)]
    streams = two_phase.streams_of(request.tensors, places, ranks.ranges)
    size = request.options.window_bytes
    return two_phase.write_through(comm, ticket.work, request.tensors, places, streams, writers, size)


def _write_direct(comm: SavingComm, request: Request, ticket: Ticket, places: Places, ranks: Ranks) -> np.ndarray:
    """Every rank writes its pieces, except of tensors in too many small pieces. Collective over: comm."""
    fine = logical.finely_cut(request.tensors, ranks.ranges)
    segments = np.empty((0, 4), np.int64)
    with comm.together(SaveFailed, doing="writing the checkpoint", plain=PLAIN):
        segments = payload.write_pieces(ticket.work, request.tensors, places, set(fine.tolist()))
    rest = _write_lanes(comm, request, ticket, places, ranks, fine, range(comm.size))
    return np.concatenate([segments, rest])


def _write_dealt(comm: SavingComm, request: Request, ticket: Ticket, places: Places, ranks: Ranks) -> np.ndarray:
    """The ranks that see the folder write what the others send them. Collective over: comm."""
    return _write_lanes(comm, request, ticket, places, ranks, np.arange(len(request.tensors)), ranks.neighbours)


def _write_lanes(
    comm: SavingComm,
    request: Request,
    ticket: Ticket,
    places: Places,
    ranks: Ranks,
    chosen: np.ndarray,
    writers: Sequence[int],
) -> np.ndarray:
    """Assign some tensors to ranks, which write them. Collective over: comm."""
    tensors = request.tensors
    lanes, owners = two_phase.deal(tensors, places, chosen, len(writers))
    if not lanes:
        return np.empty((0, 4), np.int64)
    streams = two_phase.streams_of(tensors, places, ranks.ranges, lanes)
    chosen_writers, size = [writers[owner] for owner in owners], request.options.window_bytes
    return two_phase.write_through(comm, ticket.work, tensors, places, streams, chosen_writers, size)


def _finish(comm: SavingComm, request: Request, ticket: Ticket, places: Places, segments: np.ndarray) -> int:
    """Write checksums, state.h5 and manifest, and read back; return the bytes of all files. Collective over: comm."""
    segments_by_rank = comm.gather_objects(segments)
    rng_by_rank = comm.gather_objects(request.rng)
    size_bytes = 0
    with comm.together(SaveFailed, doing="finishing the checkpoint", plain=PLAIN):
        if comm.rank == 0:
            tables = payload.block_tables(request.tensors, segments_by_rank)
            payload.write_tables(ticket.model, places, tables)
            state_path = ticket.work / schema.STATE_FILE
            tag_files.write_state(
                state_path,
                tag=ticket.tag,
                global_step=request.global_step,
                state=request.state,
                config_json=request.config_json,
                rng_by_rank=rng_by_rank,
                layout=request.layout,
            )
            manifests.sync_file(state_path)
            size_bytes = _write_manifest(request, ticket, places, tables)
    return int(comm.share(size_bytes))


def _write_manifest(request: Request, ticket: Ticket, places: Places, tables: Sequence[np.ndarray]) -> int:
    contents: dict[str, list[tuple[int, int, np.ndarray]]] = {schema.MODEL_FILE: []}
    for tensor, which, offset, table in zip(request.tensors, places.which, places.data, tables, strict=True):
        if tensor.size_bytes:
            contents.setdefault(places.files[which], []).append((int(offset), tensor.size_bytes, table))
    files = {name: payload.file_record(ticket.work / name, held) for name, held in sorted(contents.items())}
    _read_back(request, ticket, places)
    files[schema.STATE_FILE] = plain_record(ticket.work / schema.STATE_FILE)
    manifest = Manifest(
        tag=ticket.tag,
        global_step=request.global_step,
        serial=ticket.serial,
        uuid=ticket.uuid,
        created=ticket.created,
        layout=dict(request.layout),
        files=files,
    )
    if len(places.files) > 1:
        # What HDF5 made of them; who wrote the elements may be on another node and could not do it.
        for name in places.files:
            manifests.sync_file(ticket.work / name)
        sync_folder(ticket.work / schema.DATA_FOLDER)
    manifests.write(ticket.work, manifest)
    return manifest.size_bytes


def _read_back(request: Request, ticket: Ticket, places: Places) -> None:
    if request.options.verify != "none":
        data_files = [name for name in places.files if name != schema.MODEL_FILE]
        is_full = request.options.verify == "full"
        payload.read_back(ticket.work, data_files, request.tensors, is_full=is_full, seed=ticket.uuid)


def _copy(comm: SavingComm, request: Request, ticket: Ticket, places: Places) -> None:
    """Copy the checkpoint to the other disks. Collective over: comm."""
    copies.copy(comm, ticket.work, ticket.owners, SaveFailed)
    with comm.together(SaveFailed, doing="reading the copy of the checkpoint", plain=PLAIN):
        if ticket.is_keeper and comm.rank:
            _read_back(request, ticket, places)


def _publish(comm: SavingComm, request: Request, ticket: Ticket) -> None:
    """Publish the tag, make it the latest, and remove old ones. Collective over: comm."""
    options, folder = request.options, ticket.final.parent
    where = " on every node (where that worked, it stays)" if len(ticket.owners) > 1 else ""
    with (
        discarded_on_failure(ticket),
        comm.together(SaveFailed, doing=f"publishing the checkpoint{where}", plain=PLAIN),
    ):
        if ticket.is_keeper:
            tags.publish(ticket.work, ticket.final, ticket.uuid, overwrite=options.overwrite)
    with comm.together(
        SaveFailed, doing=f"checkpoint {ticket.tag!r} is saved, but not entered as the latest", plain=PLAIN
    ):
        if ticket.is_keeper and options.save_latest:
            tags.write_latest(folder, ticket.tag, ticket.uuid)
        if ticket.is_keeper and options.keep_last:
            _retain(folder, ticket.tag, options)
        if ticket.is_keeper:
            _put_scripts(folder, ticket.uuid, options)


def _put_scripts(folder: Path, uuid: str, options: SaveOptions) -> None:
    """Write the scripts that are missing; nothing ever runs or reads them."""
    for name, text in options.scripts.items():
        try:
            if not (folder / name).exists():
                temporary = folder / f".{name}.tmp-{uuid}"
                manifests.write_durably(temporary, text)
                temporary.rename(folder / name)
        except OSError as failure:  # what was to be saved is saved
            log.warning("the script %s could not be written: %s", folder / name, failure)


def _retain(folder: Path, tag: str, options: SaveOptions) -> None:
    try:
        gone = tags.retain(folder, options.keep_last, options.keep_every, spared=(tag,))
    except (OSError, CheckpointError) as failure:  # what was to be saved is saved
        log.warning("old checkpoints in %s could not be removed: %s", folder, failure)
    else:
        if gone:
            log.info("old checkpoints removed: %s", ", ".join(gone))
