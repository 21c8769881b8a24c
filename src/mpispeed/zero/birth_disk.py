"""Where the parts of born parameters rest: in memory, or in swap files until an engine takes them over."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import ALIGNMENT, BlockIO, Options
from mpispeed.store.cell import Cell, MemoryCell, SwapCell
from mpispeed.store.pool import Pool
from mpispeed.store.preflight import preflight
from mpispeed.store.swap import SwapFolder, run_name
from mpispeed.store.tiers import padded_bytes

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.native.block_io import BlockFile

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 28
"""Length of a swap file of born parts; a longer part has its own. A file goes when nothing in it is needed."""


class InMemory:
    """Parts rest in memory."""

    problem = ""

    def keep(self, owner: object, cell: Cell | None, values: torch.Tensor) -> Cell:
        """A cell with a copy of `values`."""
        if cell is None:
            return MemoryCell(values.clone())
        cell.put(values)
        return cell

    def drop(self, cell: Cell | None) -> None:
        """Nothing: memory goes with the cell."""


@dataclass(slots=True, eq=False)
class _File:
    """A swap file, and the parts in it that are still needed."""

    file: BlockFile
    nbytes: int
    end: int = 0
    needed: set[int] = field(default_factory=set)


class OnDisk:
    """Parts rest in swap files of this rank, which go with the parts: unit by unit, as an engine takes them over."""

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
        # Parts are read and written whole: nothing is ever lent.
        self._pool = Pool(ALIGNMENT, 1, name="offload_param.buffer_count")
        self._folder: SwapFolder | None = None
        self._files: list[_File] = []
        self._where: dict[int, _File] = {}  # by the id of the cell
        self._is_filling = False
        self._count = 0

    def keep(self, owner: object, cell: Cell | None, values: torch.Tensor) -> Cell:
        """A cell that holds `values` until `drop`, or as long as `owner` lives; `problem` tells what went wrong."""
        self._is_filling = True
        try:
            if cell is None:
                cell = self._make(owner, values)
            cell.put(values)
        except (StoreError, OSError) as error:
            self.problem = self.problem or str(error)
            if cell is None:
                cell = MemoryCell(values[:0].clone())  # never read: the next operation of the group raises
        finally:
            self._is_filling = False
        return cell

    def drop(self, cell: Cell | None) -> None:
        """The values of `cell` are not needed any more."""
        if cell is not None:
            self._leave(id(cell))

    def _make(self, owner: object, values: torch.Tensor) -> Cell:
        if not values.numel():
            return MemoryCell(values.clone())
        size = padded_bytes(values.numel(), values.dtype)
        file = self._files[-1] if self._files else None
        if file is None or file.end + size > file.nbytes:
            file = self._open(max(size, FILE_BYTES))
        cell = SwapCell(values.numel(), values.dtype, file.file, file.end, self._io, self._pool)
        file.end += size
        file.needed.add(id(cell))
        self._where[id(cell)] = file
        weakref.finalize(owner, self._leave, id(cell)).atexit = False
        return cell

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
        """Delete the files in which nothing is needed; the one that is being filled only if no other is left."""
        if not self._where:
            self._close()
            return
        for file in [file for file in self._files[:-1] if not file.needed]:
            self._files.remove(file)
            file.file.close()
            Path(file.file.path).unlink(missing_ok=True)

    def _close(self) -> None:
        """Nothing is needed any more."""
        self._files.clear()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    @property
    def file_bytes(self) -> int:
        """Bytes of parts in the files that are there."""
        return sum(file.end for file in self._files)
