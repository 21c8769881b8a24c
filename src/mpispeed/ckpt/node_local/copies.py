"""Copying of a finished checkpoint to other nodes, block by block along a chain.

In each round a node passes on the block that it got in the round before, so that all nodes receive at the same time and
none sends anything twice; a copy takes about as long for many nodes as for two (van de
Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997, section 4: pipelined broadcast).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import CheckpointError, MpispeedError
from mpispeed.base.files import sync_folder
from mpispeed.ckpt.format import index, schema
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format.errors import PLAIN
from mpispeed.ckpt.format.manifest import Manifest
from mpispeed.ckpt.format.payload import OpenFiles
from mpispeed.native.block_file import BlockFile
from mpispeed.native.checksum import crc32c
from mpispeed.native.page_memory import aligned

if TYPE_CHECKING:
    from mpispeed.ckpt.format.saving_comm import SavingComm

_ROUND_BYTES = 2 * schema.BLOCK_BYTES
_NOTHING = torch.empty(0, dtype=torch.uint8)
_DOING = "copying the checkpoint to the other nodes"


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a file, by the number of the file. Units: bytes."""

    file: int
    offset: int
    size: int
    is_last: bool


def copy(comm: SavingComm, folder: Path, chain: Sequence[int], error: type[MpispeedError]) -> None:
    """Copy all files of a tag from the first rank of `chain` to the disks of the others.

    Every file is compared with its checksum in the manifest, which is written last and atomically. A rank of the chain
    needs memory for two blocks of 8 MiB.

    Args:
        comm: all ranks.
        folder: of the tag on the first rank of the chain, and where it is to be on the others: there and empty.
        chain: the ranks that pass it on, in order; the first one has it.
        error: is raised on every rank, if the copy fails on any.

    Collective over: comm.
    """
    manifest: Manifest | None = None
    text = b""
    with comm.together(error, doing=_DOING, plain=PLAIN):
        if comm.rank == chain[0]:
            manifest = manifests.read(folder)
            text = (folder / schema.MANIFEST_FILE).read_bytes()
    shared: Manifest = comm.share(manifest, chain[0])
    text = comm.share(text, chain[0])
    _pass_on(comm, folder, chain, shared, error)
    with comm.together(error, doing=_DOING, plain=PLAIN):
        if comm.rank in chain[1:]:
            if shared.data_files:
                sync_folder(folder / schema.DATA_FOLDER)
            manifests.write_text(folder, text.decode())


def _blocks_of(manifest: Manifest, names: Sequence[str]) -> list[_Block]:
    found = []
    for file, name in enumerate(names):
        size = manifest.files[name].bytes
        for offset in range(0, size, _ROUND_BYTES):
            length = min(_ROUND_BYTES, size - offset)
            found.append(_Block(file, offset, length, offset + length == size))
    return found


def _pass_on(
    comm: SavingComm, folder: Path, chain: Sequence[int], manifest: Manifest, error: type[MpispeedError]
) -> None:
    names = sorted(manifest.files)
    parts = _blocks_of(manifest, names)
    rounds = len(parts) + len(chain) - 2
    with ExitStack() as stack:
        link: _Link | None = None
        with comm.together(error, doing=_DOING, plain=PLAIN):
            if comm.rank in chain:
                link = _Link(chain.index(comm.rank), len(chain), parts, aligned(2 * _ROUND_BYTES))
                if link.place == 0:
                    link.source = stack.enter_context(_Source(folder, names))
                else:
                    link.target = stack.enter_context(_Target(folder, names, manifest))
        for turn in range(rounds):
            sent, came = _NOTHING, _NOTHING
            with comm.together(error, doing=_DOING, plain=PLAIN):
                if link is not None:
                    sent, came = link.turn(turn)
            counts, out_counts = [0] * comm.size, [0] * comm.size
            if link is not None and sent.numel():
                counts[chain[link.place + 1]] = sent.numel()
            if link is not None and came.numel():
                out_counts[chain[link.place - 1]] = came.numel()
            comm.all_to_all(came, sent, out_counts, counts)
        with comm.together(error, doing=_DOING, plain=PLAIN):
            if link is not None and link.target is not None:
                link.turn(rounds)  # what came last
                link.target.sync()


class _Link:
    """One rank of the chain.

    Block `b` arrives at place `p` in round `b + p - 1` and is passed on in the next, while it is being written.
    """

    def __init__(self, place: int, places: int, parts: Sequence[_Block], memory: torch.Tensor) -> None:
        """Args: `places`: of the chain; `memory`: for two blocks."""
        self.place, self._is_end = place, place == places - 1
        self.source: _Source | None = None
        self.target: _Target | None = None
        self._parts, self._memory = parts, memory

    def turn(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the block of the previous round; return the block to send now, and the buffer for the next one."""
        block, memory = self._at(turn - self.place)
        if self.source is not None:
            if block is not None:
                self.source.read(block, memory)
            return memory, _NOTHING
        if block is not None and self.target is not None:
            self.target.write(block, memory)
        return _NOTHING if self._is_end else memory, self._at(turn - self.place + 1)[1]

    def _at(self, number: int) -> tuple[_Block | None, torch.Tensor]:
        if not 0 <= number < len(self._parts):
            return None, _NOTHING
        block, first = self._parts[number], number % 2 * _ROUND_BYTES
        return block, self._memory[first : first + block.size]


class _Source:
    """The files that are copied. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder, self._names = folder, names
        self._handles: dict[int, int] = {}

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(self, block: _Block, out: torch.Tensor) -> None:
        """Fill `out`."""
        path = self._folder / self._names[block.file]
        if block.file not in self._handles:
            self._handles[block.file] = index.open_plain(path)
        if index.read_at(self._handles[block.file], out.numpy().data, block.offset) < block.size:
            msg = f"{path} is cut off"
            raise CheckpointError(msg)


class _Target:
    """The copies, of full size from the beginning. A context manager."""

    def __init__(self, folder: Path, names: Sequence[str], manifest: Manifest) -> None:
        self._names, self._manifest, self._crc = names, manifest, 0
        if manifest.data_files:
            (folder / schema.DATA_FOLDER).mkdir()
        for name in names:
            file = BlockFile(folder / name, create=True, direct=False)
            try:
                file.allocate(manifest.files[name].bytes)
            finally:
                file.close()
        self._files = OpenFiles(folder, names)

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__(None, None, None)

    def write(self, block: _Block, data: torch.Tensor) -> None:
        """Write one block, in order; its memory must not change before the next is written or `sync` is called.

        Raises:
            CheckpointError: the file system refuses, or the file that is complete now is not what was saved.
        """
        self._files.settle()
        name, view = self._names[block.file], data.numpy().data
        self._files.write(block.file, view, block.offset, f"bytes {block.offset} to {block.offset + block.size}")
        self._crc = crc32c(view, self._crc)
        if block.is_last:
            crc, self._crc = self._crc, 0
            if crc != self._manifest.files[name].crc32c:
                msg = f"{self._files.path(block.file)} is not what was saved: its source or the way here spoilt it"
                raise CheckpointError(msg)

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        self._files.sync()
