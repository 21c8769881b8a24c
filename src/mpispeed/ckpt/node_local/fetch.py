"""Search for a node-local checkpoint, and its completion on nodes that lack it.

A save publishes its copies once all of them are complete. If its job ends in between, some nodes have the new tag and
others have it finished but unpublished; those publish it now. A node without it, because it is new or lost its disk,
gets a copy from one that has it.
"""

from __future__ import annotations

import logging
import shutil
import uuid as uuids
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import PLAIN, CorruptCheckpoint, NoCheckpoint, TagNotFound
from mpispeed.ckpt.format.manifest import Manifest
from mpispeed.ckpt.node_local import copies
from mpispeed.ckpt.read.reader import Opened, check_indexes, find

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

_NODES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of one node under a tag.

    Attributes:
        path: its folder.
        node: name of the node.
        in_subfolder: False if the folder that was passed is that of the tag itself.
    """

    path: Path
    node: str
    tag: str
    uuid: str
    created: str
    order: tuple[int, int, str]
    global_step: int
    size_bytes: int
    in_subfolder: bool

    def __str__(self) -> str:
        return f"{self.node} has that of step {self.global_step}, saved {self.created} ({self.path})"


def find_on_nodes(comm: Comm, folder: str | Path, tag: str | None = None) -> Opened:
    """Find a committed checkpoint on all nodes; afterwards every node has a complete copy in its own folder.

    Without a tag it is the newest of those that the nodes' `latest` name. Every rank passes the folder of its node.

    Args:
        comm: all ranks.
        folder: folder of checkpoints of this rank's node.
        tag: which one; None for the latest. That of rank 0 counts.

    Collective over: comm.

    Raises:
        NoCheckpoint: on every rank: no tag was given, and no node has a `latest`.
        TagNotFound: on every rank: no node has the tag.
        CheckpointError: on every rank: a copy is damaged, nodes have different checkpoints under the tag, or a node
            without one cannot get it.
    """
    folder, tag = Path(folder).absolute(), comm.share(tag)
    leaders = tags.leaders_of(comm.gather_objects((tags.own_node(), str(folder))))
    search = _Search(comm, folder, leaders)
    wanted = max(search.look(tag), key=lambda copy: copy.order)
    search.publish(wanted)
    source = search.complete(wanted)
    if tag is None:
        with comm.together(CheckpointError, doing="entering the latest checkpoint", plain=PLAIN):
            if search.is_leader and tags.read_latest(folder) != wanted.tag and wanted.in_subfolder:
                # of a name of its own: a job that was killed at this very line may have left its temporary file
                tags.write_latest(folder, wanted.tag, uuids.uuid4().hex)
    return search.open(wanted, source)


class _Search:
    """One search. All methods are collective over all ranks."""

    def __init__(self, comm: Comm, folder: Path, leaders: Sequence[int]) -> None:
        self.comm, self.folder, self._leaders = comm, folder, leaders
        self.is_leader = leaders[comm.rank] == comm.rank

    def look(self, tag: str | None) -> list[_Copy]:
        """Copies of a tag on the nodes; at least one.

        Raises:
            NoCheckpoint, TagNotFound: none has.
        """
        own: _Copy | None = None
        missing: NoCheckpoint | TagNotFound | None = None
        with self.comm.together(CheckpointError, doing="looking for the checkpoint", plain=PLAIN):
            if self.is_leader:
                try:
                    own = _own_copy(self.folder, tag)
                except (NoCheckpoint, TagNotFound) as error:
                    missing = error
        found = [copy for copy in self.comm.gather_objects(own) if copy is not None]
        if not found:
            # A folder whose `latest` names a missing tag is damaged, one without `latest` is only new.
            is_lost = any(self.comm.gather_objects(isinstance(missing, TagNotFound)))
            kind = TagNotFound if is_lost else NoCheckpoint
            is_told = missing is not None and isinstance(missing, kind)
            self.comm.agree(not is_told, str(missing), kind)
        return found

    def publish(self, wanted: _Copy) -> None:
        """Publish finished copies of the wanted checkpoint that an interrupted save left unpublished."""
        with self.comm.together(CheckpointError, doing="publishing the checkpoint", plain=PLAIN):
            if self.is_leader and wanted.in_subfolder:
                work = self.folder / f".{wanted.tag}.tmp-{wanted.uuid}"
                manifest = _whole(work)
                if manifest is not None and manifest.uuid == wanted.uuid:
                    tags.publish(work, self.folder / wanted.tag, wanted.uuid, overwrite=True)
                    log.info("%s was complete when its job ended; it is published now", self.folder / wanted.tag)

    def complete(self, wanted: _Copy) -> int:
        """Copy the wanted checkpoint to every node that lacks it; return a rank that had it."""
        comm = self.comm
        own: _Copy | None = None
        with comm.together(CheckpointError, doing="looking for the checkpoint", plain=PLAIN):
            if self.is_leader:
                with suppress(NoCheckpoint, TagNotFound):
                    own = _own_copy(self.folder, wanted.tag if wanted.in_subfolder else None)
        found = comm.gather_objects((self.is_leader and own is None, own))
        held = {rank: copy for rank, (_, copy) in enumerate(found) if copy is not None}
        others = [copy for copy in held.values() if copy.uuid != wanted.uuid]
        if others:
            shown = "; ".join(str(copy) for copy in [wanted, *others][:_NODES_SHOWN])
            msg = f"nodes have different checkpoints under the tag {wanted.tag!r}: {shown}; remove the wrong ones"
            comm.agree(comm.rank > 0, msg, CheckpointError)
        source = min(held)
        if any(lacks for lacks, _ in found):
            msg = f"not every node has {wanted.path}; pass the folder that it is in, and a tag"
            comm.agree(comm.rank > 0 or wanted.in_subfolder, msg, CheckpointError)
            self._receive(held[source], source, lacks=found[comm.rank][0])
        return source

    def _receive(self, copy: _Copy, source: int, lacks: bool) -> None:
        """Copy the checkpoint to the ranks that lack it."""
        comm = self.comm
        work = self.folder / f".{copy.tag}.tmp-{comm.share(uuids.uuid4().hex)}"
        is_made = False
        try:
            with comm.together(CheckpointError, doing="making room for the checkpoint", plain=PLAIN):
                is_made = lacks and _make(work, copy)
            made = [rank for rank, is_there in enumerate(comm.gather_objects(is_made)) if is_there]
            copies.copy(comm, copy.path if comm.rank == source else work, [source, *made], CheckpointError)
            with comm.together(CheckpointError, doing="publishing the checkpoint", plain=PLAIN):
                if is_made:
                    tags.publish(work, self.folder / copy.tag, copy.uuid, overwrite=False)
        except BaseException:
            if is_made:
                shutil.rmtree(work, ignore_errors=True)
            raise
        if is_made:
            log.info("%s was not on %s; it was copied from %s", self.folder / copy.tag, tags.own_node()[0], copy.node)

    def open(self, wanted: _Copy, source: int) -> Opened:
        """Check the copies of all nodes; every rank gets its node's."""
        comm = self.comm
        opened: Opened | None = None
        path = self.folder
        with comm.together(CheckpointError, doing="opening the checkpoint", plain=PLAIN):
            if self.is_leader:
                path = tags.resolve(self.folder, wanted.tag if wanted.in_subfolder else None)[0]
            if comm.rank == source:
                opened = find(path)
        shared: Opened = comm.share(opened, source)
        with comm.together(CheckpointError, doing="opening the checkpoint", plain=PLAIN):
            if self.is_leader and comm.rank != source:
                check_copy(path, shared)
        paths = comm.gather_objects(path)
        return replace(shared, path=paths[self._leaders[comm.rank]], tag=wanted.tag)


def _own_copy(folder: Path, tag: str | None) -> _Copy:
    """This node's copy. Raises: as `tags.resolve`, and for a copy that is damaged or was never finished."""
    path, name = tags.resolve(folder, tag)
    manifest = manifests.read(path)
    manifests.check_sizes(path, manifest)
    return _Copy(
        path=path,
        node=tags.own_node()[0],
        tag=name,
        uuid=manifest.uuid,
        created=manifest.created,
        order=manifest.order,
        global_step=manifest.global_step,
        size_bytes=manifest.size_bytes,
        in_subfolder=path != folder,
    )


def _whole(path: Path) -> Manifest | None:
    """The manifest of a folder, or None unless all its files are there."""
    try:
        manifest = manifests.read(path)
        manifests.check_sizes(path, manifest)
    except CheckpointError:
        return None
    return manifest


def _make(work: Path, copy: _Copy) -> bool:
    """Make a work folder; False if another node that shares the folder has made it."""
    work.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work.parent).free
    if free < copy.size_bytes:
        have, want = format_bytes(free), format_bytes(copy.size_bytes)
        msg = f"{work.parent} has {have} free, the checkpoint {copy.tag!r} from {copy.node} needs {want}; make room"
        raise CheckpointError(msg)
    try:
        work.mkdir()
    except FileExistsError:
        return False
    return True


def check_copy(path: Path, opened: Opened) -> None:
    """Check that the folder `path` has the same checkpoint, as far as `find` does, without reading its index again.

    Raises:
        CorruptCheckpoint: it has another one, a file is missing or of another size, or its index was altered.
        CheckpointError: it cannot be read.
    """
    manifest = manifests.read(path)
    if manifest != opened.manifest:
        msg = f"{path} is not the same checkpoint as {opened.path}; remove it, and a copy of that one takes its place"
        raise CorruptCheckpoint(msg)
    manifests.check_sizes(path, manifest)
    check_indexes(path, manifest)
