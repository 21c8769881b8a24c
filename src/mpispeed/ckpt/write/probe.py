"""Probe of a file system for writes of several nodes into one file."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.ckpt.format.errors import together
from mpispeed.ckpt.write.request import Ranks, Request
from mpispeed.store.mounts import mount_of

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

#: file systems whose nodes keep pages of their own: parts of one page from two nodes may be lost
INCOHERENT_TYPES = frozenset({"9p", "afs", "cifs", "coda", "ncpfs", "nfs", "nfs4", "smb3", "vboxsf", "virtiofs"})
#: of those in user space, the ones that are made for it; others are not trusted
COHERENT_FUSE = frozenset({"fuse.ceph", "fuse.glusterfs"})

#: each node writes so much, unaligned, so that nodes share pages
_SHARE_BYTES = 1000


def is_direct(comm: Comm, request: Request, ranks: Ranks, work: Path) -> bool:
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
    with together(comm, "looking at the file system"):
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


def _say(comm: Comm, why: str) -> None:
    if comm.rank == 0:
        log.info("%s: one rank per file writes the checkpoint", why)


def _try(comm: Comm, path: Path, leaders: Sequence[int]) -> bool:
    """Collective over: comm."""
    with together(comm, "trying the file system"):
        if comm.rank == 0:
            path.touch()
    with together(comm, "trying the file system"):
        if comm.rank in leaders:
            node = leaders.index(comm.rank)
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(handle, bytes([node % 251 + 1]) * _SHARE_BYTES, node * _SHARE_BYTES)
                os.fsync(handle)
            finally:
                os.close(handle)
    is_whole = True
    with together(comm, "trying the file system"):
        if comm.rank == 0:
            is_whole = path.read_bytes() == b"".join(
                bytes([node % 251 + 1]) * _SHARE_BYTES for node in range(len(leaders))
            )
            path.unlink()
    return bool(comm.share(is_whole))
