"""The folder that a checkpoint is written in before it is published."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import uuid as uuids
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt import model_file, schema, tags
from mpispeed.ckpt.model_file import Places
from mpispeed.ckpt.request import Request, together

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

#: HDF5 metadata of one tensor and its checksums, for the estimate of free space
_METADATA_BYTES = 4096
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ticket:
    """What rank 0 decides and shares before ranks write.

    Attributes:
        work: where files are written.
        final: where the folder goes.
    """

    tag: str
    uuid: str
    work: Path
    final: Path
    created: str

    @property
    def model(self) -> Path:
        """The file to open."""
        return self.work / schema.MODEL_FILE


def begin(comm: Comm, request: Request) -> Ticket:
    """Make the work folder.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank: the tag is taken or no tag, or the folder cannot be made.
    """
    ticket: Ticket | None = None
    with together(comm, "starting the checkpoint"):
        if comm.rank == 0:
            ticket = _ticket(request)
    shared: Ticket = comm.share(ticket)
    with discarded_on_failure(comm, shared):
        with together(comm, "starting the checkpoint"):
            if comm.rank == 0:
                tags.refuse_taken(shared.final, overwrite=request.options.overwrite)
                request.folder.mkdir(parents=True, exist_ok=True)
                if request.options.check_free_space:
                    _check_free_space(request)
                shared.work.mkdir()
        with together(comm, "finding the folder of the checkpoint"):
            if not shared.work.is_dir():
                msg = f"{shared.work} was made by rank 0 and is not here; save to a folder that all nodes share"
                raise CheckpointError(msg)
    return shared


def lay_out(comm: Comm, request: Request, ticket: Ticket, files: int) -> Places:
    """Make the files with everything but elements and checksums.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank.
    """
    places = Places()
    with together(comm, "laying the checkpoint out"):
        if comm.rank == 0:
            places = model_file.create(
                ticket.work,
                tag=ticket.tag,
                global_step=request.global_step,
                params=request.params,
                tensors=request.tensors,
                aliases=request.aliases,
                files=files,
            )
            _check_room(request, ticket, places)
    shared: Places = comm.share(places)
    return shared


@contextlib.contextmanager
def discarded_on_failure(comm: Comm, ticket: Ticket) -> Iterator[None]:
    """Remove the work folder if the body fails."""
    try:
        yield
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(ticket.work, ignore_errors=True)
        raise


def _ticket(request: Request) -> Ticket:
    tag, uuid = tags.check_tag(request.tag), uuids.uuid4().hex
    return Ticket(
        tag=tag,
        uuid=uuid,
        work=request.folder / f".{tag}.tmp-{uuid}",
        final=request.folder / tag,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _check_free_space(request: Request) -> None:
    elements = sum(tensor.size_bytes for tensor in request.tensors)
    needed = elements + len(request.tensors) * _METADATA_BYTES + request.state_bytes + _SLACK_BYTES
    free = shutil.disk_usage(request.folder).free
    if free < needed:
        have, want = format_bytes(free), format_bytes(needed)
        left = len(list(request.folder.glob(".*.tmp-*")))
        prune = f"; `mpispeed ckpt prune {request.folder}` removes what {left} unfinished saves left" if left else ""
        msg = f"{request.folder} has {have} free, the checkpoint needs about {want}; make room{prune}"
        raise CheckpointError(msg)


def _check_room(request: Request, ticket: Ticket, places: Places) -> None:
    """Every tensor lies inside its file, so that ranks write nothing HDF5 does not know of."""
    sizes = [(ticket.work / name).stat().st_size for name in places.files]
    for tensor, which, offset in zip(request.tensors, places.which.tolist(), places.data.tolist(), strict=True):
        if tensor.size_bytes and (offset < 0 or offset + tensor.size_bytes > sizes[which]):
            room, file = format_bytes(tensor.size_bytes), ticket.work / places.files[which]
            msg = f"HDF5 could not reserve {room} for {tensor.label} in {file}"
            raise CheckpointError(msg)
