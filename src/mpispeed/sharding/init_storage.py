"""Storage of parameters from sharded init: memory, or swap files until an engine takes them over."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.mesh.comm import text_of
from mpispeed.native.block_io import ALIGNMENT, BlockIO, Options
from mpispeed.store.pool import Pool
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.stored_tensor import MemoryTensor, StoredTensor, SwappedTensor
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import padded_bytes

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.native.block_io import BlockFile

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 28
"""Length of a swap file of born parts; a longer part has its own. A file goes when nothing in it is needed."""


class InMemory:
    """Shards in memory."""

    problem = ""

    def keep(self, owner: object, stored: StoredTensor | None, values: torch.Tensor) -> StoredTensor:
        """A stored tensor with a copy of `values`."""
        if stored is None:
            return MemoryTensor(values.clone())
        stored.put(values)
        return stored

    def drop(self, stored: StoredTensor | None) -> None:
        """Do nothing: memory goes with the stored tensor."""


@dataclass(slots=True, eq=False)
class _File:
    """A swap file, and the shards in it that are still needed."""

    file: BlockFile
    nbytes: int
    end: int = 0
    needed: set[int] = field(default_factory=set)


class OnDisk:
    """Shards in swap files of this rank, deleted file by file as an engine takes the units over."""

    def __init__(self, comm: Comm, node: Comm, root: Path, options: Options) -> None:
        """Try the folder; files are made when they are needed.

        Collective over: `comm`.

        Raises:
            ConfigError: on every rank, if one cannot use its folder.
        """
        preflight(comm, node, root, 0, options)
        self.problem = ""  # the first part that could not be written; other ranks have to hear of it
        self._root, self._run, self._rank = root, run_name(), comm.rank
        self._io = BlockIO(options)
        # Shards are read and written as a whole, never leased.
        self._pool = Pool(ALIGNMENT, 1, name="offload_param.buffer_count")
        self._folder: SwapFolder | None = None
        self._files: list[_File] = []
        self._where: dict[int, _File] = {}  # by the id of the stored tensor
        self._is_filling = False
        self._count = 0

    def keep(self, owner: object, stored: StoredTensor | None, values: torch.Tensor) -> StoredTensor:
        """A stored tensor that holds `values` until `drop` or the end of `owner`; `problem` has any error."""
        self._is_filling = True
        try:
            if stored is None:
                stored = self._make(owner, values)
            stored.put(values)
        except Exception as error:  # whatever it is: the other ranks go on
            self.problem = self.problem or text_of(error, plain=(StoreError, OSError))
            if stored is None:
                stored = MemoryTensor(values[:0].clone())  # never read: the next operation of the group raises
        finally:
            self._is_filling = False
        return stored

    def drop(self, stored: StoredTensor | None) -> None:
        """Mark the values of `stored` as not needed any more."""
        if stored is not None:
            self._leave(id(stored))

    def _make(self, owner: object, values: torch.Tensor) -> StoredTensor:
        if not values.numel():
            return MemoryTensor(values.clone())
        size = padded_bytes(values.numel(), values.dtype)
        file = self._files[-1] if self._files else None
        if file is None or file.end + size > file.nbytes:
            file = self._open(max(size, FILE_BYTES))
        stored = SwappedTensor(values.numel(), values.dtype, file.file, file.end, self._io, self._pool)
        file.end += size
        file.needed.add(id(stored))
        self._where[id(stored)] = file
        weakref.finalize(owner, self._leave, id(stored)).atexit = False
        return stored

    def _open(self, nbytes: int) -> _File:
        if self._folder is None:
            self._folder = SwapFolder(self._root, self._run, self._rank)
        self._count += 1
        file = self._folder.file(f"born{self._count}", nbytes, reserve=False)
        file.truncate(nbytes)  # a hole: it takes the space of what is written
        self._files.append(_File(file, nbytes))
        return self._files[-1]

    def _leave(self, key: int) -> None:
        file = self._where.pop(key, None)
        if file is None:
            return
        file.needed.discard(key)
        if not self._is_filling:  # the collector may call this at any time
            self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        """Delete files without needed shards; the one being filled only if no other is left."""
        if not self._where:
            self._close()
            return
        for file in [file for file in self._files[:-1] if not file.needed]:
            self._files.remove(file)
            file.file.close()
            Path(file.file.path).unlink(missing_ok=True)

    def _close(self) -> None:
        """Drop all shards."""
        self._files.clear()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    @property
    def file_bytes(self) -> int:
        """Bytes of shards in the files that exist."""
        return sum(file.end for file in self._files)
