"""Saving: rank 0 lays the files out, every rank writes its pieces, and the tag appears at once or not at all."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import shutil
import time
import uuid as uuids
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import CheckpointError, MpispeedError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt import logical, model_file, payload, schema, state_file, tags, tree
from mpispeed.ckpt import manifest as manifests
from mpispeed.ckpt.errors import SaveFailed, UnsupportedValue
from mpispeed.ckpt.logical import LogicalTensor, ParamInfo
from mpispeed.ckpt.manifest import Manifest
from mpispeed.ckpt.model_file import Offsets

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

#: HDF5 metadata of one tensor and its checksums, for the estimate of free space
_METADATA_BYTES = 4096
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save.

    Attributes:
        overwrite: replace a tag that exists; the old one stays until the new one is complete.
        save_latest: make `latest` name the new tag.
        verify: read back "sample" (1 % of the blocks), "full" or "none" before the tag is published.
        check_free_space: refuse early when the file system has less room than the checkpoint needs.
    """

    overwrite: bool = False
    save_latest: bool = True
    verify: str = "sample"
    check_free_space: bool = True

    def __post_init__(self) -> None:
        if self.verify not in ("none", "sample", "full"):
            msg = f"SaveOptions.verify is {self.verify!r}; it may be none, sample or full"
            raise CheckpointError(msg)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did; the same on every rank but for the seconds.

    Units:
        size_bytes: bytes of all files; seconds: wall time of this rank.
    """

    path: Path
    tag: str
    uuid: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Request:
    params: Sequence[ParamInfo]
    tensors: Sequence[LogicalTensor]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    config_json: str
    rng: Mapping[str, bytes]
    layout: Mapping[str, Any]
    options: SaveOptions
    global_step: int


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What rank 0 decides and shares before ranks write."""

    tag: str
    uuid: str
    work: Path
    final: Path
    created: str
    offsets: Offsets = field(default_factory=lambda: Offsets(np.empty(0, np.int64), np.empty(0, np.int64)))

    @property
    def model(self) -> Path:
        """The file that all ranks write to."""
        return self.work / schema.MODEL_FILE


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
    0's. `state["engine"]["global_steps"]`, if there, becomes the step of the checkpoint.

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
    started = time.monotonic()
    with _together(comm, "preparing the checkpoint"):
        request = _request(params, tensors, aliases, state, config_json, rng, layout, options)
        logical.check_names(request.params, request.tensors)
        logical.check_pieces(request.tensors)
    with _together(comm, "checking the state to save", UnsupportedValue):
        state_bytes = tree.check(dict(request.state), "state")
    _check_same_content(comm, request)
    ranges = comm.gather_objects(logical.local_ranges(request.tensors))
    with _together(comm, "checking the pieces"):
        logical.check_coverage(request.tensors, ranges)
    ticket = _begin(comm, Path(folder), str(tag), request, state_bytes)
    try:
        size_bytes = _write_and_publish(comm, request, ticket)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(ticket.work, ignore_errors=True)
        raise
    comm.barrier()
    return SaveReport(ticket.final, ticket.tag, ticket.uuid, size_bytes, time.monotonic() - started)


@contextlib.contextmanager
def _together(comm: Comm, doing: str, error: type[MpispeedError] = SaveFailed) -> Iterator[None]:
    """Run a local step on every rank; if it fails on any, all raise. No verb may be called inside."""
    try:
        yield
    except Exception as failure:
        is_ours = isinstance(failure, (MpispeedError, OSError))
        text = str(failure) if is_ours else f"{type(failure).__name__}: {failure}"
        comm.agree(False, f"{doing}: {text}", error)
        raise  # agree has raised already; this keeps the step from being taken as done
    comm.agree(True, "", error)


def _request(
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str] | None,
    state: Mapping[str, Any] | None,
    config_json: str,
    rng: Mapping[str, Any] | None,
    layout: Mapping[str, Any] | None,
    options: SaveOptions | None,
) -> _Request:
    state = state or {}
    if schema.RNG in state:
        msg = f"the state has a part named {schema.RNG!r}, which belongs to the generators; rename it"
        raise CheckpointError(msg)
    names = {param.name for param in params}
    for alias, canonical in (aliases or {}).items():
        if canonical not in names or alias in names:
            msg = f"alias {alias!r} of {canonical!r}: the canonical name must be a parameter and the alias must not"
            raise CheckpointError(msg)
    json.dumps(layout or {})
    engine = state.get("engine", {})
    return _Request(
        params=tuple(params),
        tensors=tuple(tensors),
        aliases=dict(aliases or {}),
        state=state,
        config_json=str(config_json),
        rng={kind: state_file.rng_bytes(value) for kind, value in (rng or {}).items()},
        layout=dict(layout or {}),
        options=options or SaveOptions(),
        global_step=int(engine.get("global_steps", 0)) if isinstance(engine, Mapping) else 0,
    )


def _check_same_content(comm: Comm, request: _Request) -> None:
    """All ranks describe the same checkpoint.

    Collective over: comm.
    """
    mine: list[tuple[object, ...]] = [param.identity() for param in request.params]
    mine += [tensor.identity() for tensor in request.tensors]
    mine += [("alias", *pair) for pair in sorted(request.aliases.items())]
    digests = comm.gather_objects(hashlib.blake2b(repr(mine).encode(), digest_size=16).digest())
    if len(set(digests)) == 1:
        return
    reference = comm.share(mine)
    difference = logical.first_difference(mine, reference)
    comm.agree(not difference, f"ranks describe different checkpoints: {difference}", SaveFailed)


def _begin(comm: Comm, folder: Path, tag: str, request: _Request, state_bytes: int) -> _Ticket:
    """Make the work folder and lay model.h5 out.

    Collective over: comm.
    """
    ticket: _Ticket | None = None
    with _together(comm, "starting the checkpoint"):
        if comm.rank == 0:
            ticket = _lay_out(folder.absolute(), tags.check_tag(tag), request, state_bytes)
    shared: _Ticket = comm.share(ticket)
    return shared


def _lay_out(folder: Path, tag: str, request: _Request, state_bytes: int) -> _Ticket:
    uuid = uuids.uuid4().hex
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    tags.refuse_taken(folder / tag, overwrite=request.options.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    if request.options.check_free_space:
        _check_free_space(folder, request, state_bytes)
    work = folder / f".{tag}.tmp-{uuid}"
    work.mkdir()
    try:
        offsets = model_file.create(
            work / schema.MODEL_FILE,
            tag=tag,
            global_step=request.global_step,
            params=request.params,
            tensors=request.tensors,
            aliases=request.aliases,
        )
        _check_room(work / schema.MODEL_FILE, request.tensors, offsets)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return _Ticket(tag, uuid, work, folder / tag, created, offsets)


def _check_free_space(folder: Path, request: _Request, state_bytes: int) -> None:
    needed = sum(tensor.size_bytes + _METADATA_BYTES for tensor in request.tensors) + state_bytes + _SLACK_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        msg = f"{folder} has {format_bytes(free)} free, the checkpoint needs about {format_bytes(needed)}; make room"
        raise CheckpointError(msg)


def _check_room(model: Path, tensors: Sequence[LogicalTensor], offsets: Offsets) -> None:
    """Every tensor lies inside the file, so that ranks write nothing HDF5 does not know of."""
    size = model.stat().st_size
    for tensor, offset in zip(tensors, offsets.data.tolist(), strict=True):
        if tensor.size_bytes and (offset < 0 or offset + tensor.size_bytes > size):
            msg = f"HDF5 could not reserve {format_bytes(tensor.size_bytes)} for {tensor.label} in {model}"
            raise CheckpointError(msg)


def _write_and_publish(comm: Comm, request: _Request, ticket: _Ticket) -> int:
    """Steps 2 to 6 of the commit protocol.

    Collective over: comm.

    Returns:
        Bytes of all files.
    """
    segments = np.empty((0, 4), np.int64)
    with _together(comm, "writing the checkpoint"):
        segments = payload.write_pieces(ticket.model, request.tensors, ticket.offsets)
    segments_by_rank = comm.gather_objects(segments)
    rng_by_rank = comm.gather_objects(request.rng)
    size_bytes = 0
    with _together(comm, "finishing the checkpoint"):
        if comm.rank == 0:
            tables = payload.block_tables(request.tensors, segments_by_rank)
            size_bytes = _finish(request, ticket, tables, rng_by_rank)
            tags.publish(ticket.work, ticket.final, ticket.uuid, overwrite=request.options.overwrite)
    with _together(comm, f"checkpoint {ticket.tag!r} is saved, but not entered as the latest"):
        if comm.rank == 0 and request.options.save_latest:
            tags.write_latest(ticket.final.parent, ticket.tag, ticket.uuid)
    return int(comm.share(size_bytes))


def _finish(
    request: _Request, ticket: _Ticket, tables: Sequence[np.ndarray], rng_by_rank: Sequence[Mapping[str, bytes]]
) -> int:
    """Checksums, state.h5, read-back and manifest, on rank 0; returns the bytes of all files."""
    payload.write_tables(ticket.model, ticket.offsets, tables)
    state_path = ticket.work / schema.STATE_FILE
    state_file.write(
        state_path,
        tag=ticket.tag,
        global_step=request.global_step,
        state=request.state,
        config_json=request.config_json,
        rng_by_rank=rng_by_rank,
        layout=request.layout,
    )
    manifests.sync_file(state_path)
    if request.options.verify != "none":
        stored = list(model_file.read_index(ticket.model).tensors.values())
        payload.read_back(ticket.model, stored, is_full=request.options.verify == "full", seed=ticket.uuid)
    manifest = Manifest(
        tag=ticket.tag,
        global_step=request.global_step,
        uuid=ticket.uuid,
        created=ticket.created,
        layout=dict(request.layout),
        files={
            schema.MODEL_FILE: payload.model_record(ticket.model, request.tensors, ticket.offsets, tables),
            schema.STATE_FILE: payload.plain_record(state_path),
        },
    )
    manifests.write(ticket.work, manifest)
    return manifest.size_bytes
