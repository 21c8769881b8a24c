"""The work folder, in which a checkpoint is written before it is published, and the probe of its file system."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import uuid as uuids
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import schema, tag_files, tags
from mpispeed.ckpt.format.errors import PLAIN, SaveFailed
from mpispeed.ckpt.format.tag_files import Places
from mpispeed.ckpt.write.request import Ranks, Request
from mpispeed.store.mounts import mount_of

if TYPE_CHECKING:
    from mpispeed.ckpt.format.saving_comm import SavingComm


#: HDF5 metadata of one tensor and its checksums, for the estimate of free space
_METADATA_BYTES = 4096
_SLACK_BYTES = 1 << 20


@dataclass(slots=True)
class Ticket:
    """Decisions of rank 0 about a save, shared before ranks write.

    Attributes:
        serial: as in the manifest.
        work: the work folder.
        final: the folder of the published tag.
        is_keeper: this rank made `work`, moves it to its place, and removes it if the save fails.
        owners: the ranks that made one, rank 0 first; only rank 0 unless storage is node-local.
    """

    tag: str
    uuid: str
    created: str
    serial: int
    work: Path
    final: Path
    is_keeper: bool = False
    owners: tuple[int, ...] = (0,)

    @property
    def model(self) -> Path:
        """The file to open."""
        return self.work / schema.MODEL_FILE


def begin(comm: SavingComm, request: Request, ranks: Ranks) -> Ticket:
    """Make the work folder, one on every disk.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank: the tag is taken or no tag, or the folder cannot be made.
    """
    decided: tuple[str, str, str] | None = None
    is_local, last = request.options.node_local, 0
    with comm.together(SaveFailed, doing="starting the checkpoint", plain=PLAIN):
        if comm.rank == 0 or (is_local and comm.rank in ranks.leaders):
            last = tags.last_serial(request.folder)
        if comm.rank == 0:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
            decided = (tags.check_tag(request.tag), uuids.uuid4().hex, now)
    tag, uuid, created = comm.share(decided)
    serial = manifests.next_serial(max(comm.gather_objects(last)))
    ticket = Ticket(tag, uuid, created, serial, request.folder / f".{tag}.tmp-{uuid}", request.folder / tag)
    with discarded_on_failure(ticket):
        with comm.together(SaveFailed, doing="starting the checkpoint", plain=PLAIN):
            if comm.rank == 0:
                _make(request, ticket)
        with comm.together(SaveFailed, doing="starting the checkpoint", plain=PLAIN):
            # Nodes that share it after all find it made; of two that share another one the first to come makes it.
            if is_local and comm.rank in ranks.leaders and not ticket.work.is_dir():
                with contextlib.suppress(FileExistsError):
                    _make(request, ticket)
        with comm.together(SaveFailed, doing="finding the folder of the checkpoint", plain=PLAIN):
            if not ticket.work.is_dir():
                maker, wish = (
                    "rank 0",
                    "save to a folder that all nodes share, or set checkpoint.use_node_local_storage",
                )
                if is_local:
                    maker, wish = "the first rank of this node", "all ranks of a node need the same folder"
                msg = f"{ticket.work} was made by {maker} and is not here; {wish}"
                raise CheckpointError(msg)
        if is_local:
            ticket.owners = tuple(rank for rank, made in enumerate(comm.gather_objects(ticket.is_keeper)) if made)
    return ticket


def _make(request: Request, ticket: Ticket) -> None:
    tags.refuse_taken(ticket.final, overwrite=request.options.overwrite)
    request.folder.mkdir(parents=True, exist_ok=True)
    if request.options.check_free_space:
        _check_free_space(request)
    ticket.work.mkdir()
    ticket.is_keeper = True


def lay_out(comm: SavingComm, request: Request, ticket: Ticket, files: int) -> Places:
    """Create the files with everything but elements and checksums.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank.
    """
    places = Places()
    with comm.together(SaveFailed, doing="laying the checkpoint out", plain=PLAIN):
        if comm.rank == 0:
            places = tag_files.create(
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
def discarded_on_failure(ticket: Ticket) -> Iterator[None]:
    """Context that removes the work folder if its body fails."""
    try:
        yield
    except BaseException:
        if ticket.is_keeper:
            shutil.rmtree(ticket.work, ignore_errors=True)
        raise


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
    """Check that every tensor is inside its file, so that ranks write no bytes unknown to HDF5."""
    sizes = [(ticket.work / name).stat().st_size for name in places.files]
    for tensor, which, offset in zip(request.tensors, places.which.tolist(), places.data.tolist(), strict=True):
        if tensor.size_bytes and (offset < 0 or offset + tensor.size_bytes > sizes[which]):
            room, file = format_bytes(tensor.size_bytes), ticket.work / places.files[which]
            msg = f"HDF5 could not reserve {room} for {tensor.label} in {file}"
            raise CheckpointError(msg)


log = logging.getLogger(__name__)

#: file systems whose nodes keep pages of their own: parts of one page from two nodes may be lost
INCOHERENT_TYPES = frozenset({"9p", "afs", "cifs", "coda", "ncpfs", "nfs", "nfs4", "smb3", "vboxsf", "virtiofs"})
#: of those in user space, the ones that are made for it; others are not trusted
COHERENT_FUSE = frozenset({"fuse.ceph", "fuse.glusterfs"})

#: each node writes so much, unaligned, so that nodes share pages
_SHARE_BYTES = 1000


def is_direct(comm: SavingComm, request: Request, ranks: Ranks, work: Path) -> bool:
    """True if every rank may write its own pieces into the files in `work`.

    Always on one node. On several, the type of the file system has to allow it, and then a trial: the first rank of
    each node writes its part of a small file, and rank 0 reads it back.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank, if the folder cannot be reached from a node.
    """
    writing = request.options.writing
    if writing != "auto" or len(ranks.leaders) == 1:
        return writing != "aggregated"
    kind = ""
    with comm.together(SaveFailed, doing="looking at the file system", plain=PLAIN):
        kind = mount_of(work).type if comm.rank in ranks.leaders else ""
    incoherent = sorted(filter(_is_incoherent, set(comm.gather_objects(kind))))
    if incoherent:
        _say(comm, f"{request.folder} is on {', '.join(incoherent)}")
        return False
    is_whole = _try(comm, work / "probe", ranks.leaders)
    if not is_whole:
        _say(comm, f"a trial in {request.folder} lost what another node wrote")
    return is_whole


def _is_incoherent(kind: str) -> bool:
    return kind in INCOHERENT_TYPES or (kind.startswith("fuse") and kind not in COHERENT_FUSE)


def _say(comm: SavingComm, why: str) -> None:
    if comm.rank == 0:
        log.info("%s: one rank per file writes the checkpoint", why)


def _try(comm: SavingComm, path: Path, leaders: Sequence[int]) -> bool:
    """Collective over: comm."""
    with comm.together(SaveFailed, doing="trying the file system", plain=PLAIN):
        if comm.rank == 0:
            path.touch()
    with comm.together(SaveFailed, doing="trying the file system", plain=PLAIN):
        if comm.rank in leaders:
            node = leaders.index(comm.rank)
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(handle, bytes([node % 251 + 1]) * _SHARE_BYTES, node * _SHARE_BYTES)
                os.fsync(handle)
            finally:
                os.close(handle)
    is_whole = True
    with comm.together(SaveFailed, doing="trying the file system", plain=PLAIN):
        if comm.rank == 0:
            is_whole = path.read_bytes() == b"".join(
                bytes([node % 251 + 1]) * _SHARE_BYTES for node in range(len(leaders))
            )
            path.unlink()
    return bool(comm.share(is_whole))
