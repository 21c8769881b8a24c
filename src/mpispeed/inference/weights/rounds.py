"""Carrying out a schedule: ranks read pieces, hand them to their node through shared memory, and take theirs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign import crc32
from mpispeed.ckpt.foreign.in_file import Files, InFile
from mpispeed.ckpt.foreign.mapping import Extent
from mpispeed.ckpt.format import schema
from mpispeed.inference.weights import schedule
from mpispeed.inference.weights.plan import Pair
from mpispeed.inference.weights.schedule import READERS, Piece, Round
from mpispeed.inference.weights.targets import Target
from mpispeed.mesh.backends.shared_memory import share_memory
from mpispeed.mesh.comm import Comm, Failures


@dataclass(frozen=True, slots=True)
class Sum:
    """Checksum of a piece of a range; `first` and `nbytes` count from the beginning of that."""

    extent: Extent
    first: int
    nbytes: int
    crc: int


class Rounds:
    """The rounds of a load on one rank.

    Args:
        node: the ranks that share memory.
        rank: in the slicing group.
        files: to read from.
        pairs: by their positions in the schedule.
        threads: that read at the same time.
    """

    def __init__(self, node: Comm, rank: int, files: Files, pairs: Sequence[Pair], threads: int) -> None:
        self._node, self._rank, self._files, self._pairs = node, rank, files, pairs
        self._threads, self._sums, self._spare = threads, list[Sum](), list[torch.Tensor]()
        self._memory: torch.Tensor | None = None
        self._is_shared = False

    def carry_out(self, rounds: Sequence[Round], done: Callable[[Target], None]) -> list[Sum]:
        """Read and place everything; the checksums of this rank's pieces of ranges that have one.

        Args:
            rounds: the schedule.
            done: called for each tensor that is complete, in the same order on all ranks.

        Collective over: the ranks of the node.

        Raises:
            CheckpointError: a rank failed; on all ranks of the node.
        """
        if any(each.slots for each in rounds):
            self._open()
        failures = Failures()
        with failures.kept():
            for each in self._pairs:
                if each.mapped is not None:
                    each.target.map(each.mapped.within(self._files))
        with ThreadPoolExecutor(self._threads, "weights") as pool:
            filling = self._fill(pool, rounds[0], 0, failures)
            for turn, current in enumerate(rounds):
                buffers = self._filled(filling, failures)
                self._meet(current, turn, failures)
                if turn + 1 < len(rounds):
                    filling = self._fill(pool, rounds[turn + 1], turn + 1, failures)
                with failures.kept():
                    self._place(current, turn, buffers)
                    for pair in current.done:
                        target = self._pairs[pair].target
                        target.storage(self._rank)  # also where this rank has no element of it
                        done(target)
                self._spare += [buffer for _, buffer in buffers]
            self._agree(failures)
        return self._sums

    def _open(self) -> None:
        """Map two buffers in turn for each rank that reads at the same time. Collective over: the node."""
        count = 2 * min(self._node.size, READERS)
        if self._node.transport.shares_memory:
            self._memory = share_memory(self._node.transport, count * schedule.PIECE_BYTES)
        self._is_shared = self._memory is not None
        if self._memory is None:
            self._memory = torch.empty(count * schedule.PIECE_BYTES, dtype=torch.uint8)
        self._memory = self._memory.view(2, count // 2, schedule.PIECE_BYTES)

    def _fill(
        self, pool: ThreadPoolExecutor, current: Round, turn: int, failures: Failures
    ) -> list[tuple[Piece, torch.Tensor | None, Future[None]]]:
        """Start to read this rank's pieces of a round: into the slices, into shared memory, or into buffers."""
        started: list[tuple[Piece, torch.Tensor | None, Future[None]]] = []
        with failures.kept():
            for piece in current.private.get(self._node.rank, ()):
                if isinstance(piece.leaf, InFile) and self._is_mapped(piece):
                    started.append((piece, None, pool.submit(self._check, piece, piece.leaf)))
                    continue
                data, buffer = self._straight(piece), None
                if data is None:
                    buffer = self._buffer()
                    data = buffer[: piece.nbytes].view(piece.leaf.dtype)
                started.append((piece, buffer, pool.submit(self._read, piece, data)))
            for number, slot in enumerate(current.slots):
                if slot.reader != self._node.rank:
                    continue
                for piece, start in zip(slot.pieces, slot.starts, strict=True):
                    data = self._slot(turn, number)[start : start + piece.nbytes].view(piece.leaf.dtype)
                    started.append((piece, None, pool.submit(self._read, piece, data)))
        return started

    def _filled(
        self, started: Sequence[tuple[Piece, torch.Tensor | None, Future[None]]], failures: Failures
    ) -> list[tuple[Piece, torch.Tensor]]:
        """Wait until all is read; the pieces that are in buffers."""
        for _, _, future in started:
            with failures.kept():
                future.result()
        return [(piece, buffer) for piece, buffer, _ in started if buffer is not None]

    def _straight(self, piece: Piece) -> torch.Tensor | None:
        """The memory in the slice that a piece can be read into as it is; None if there is no such."""
        if piece.pair < 0 or not isinstance(piece.leaf, InFile):
            return None
        pair = self._pairs[piece.pair]
        target = pair.target
        if pair.mapped is not None or target.dtype != piece.leaf.dtype:
            return None
        count = piece.last - piece.first
        first = pair.routes[piece.shard].direct(piece.at, piece.at + count)
        values = target.storage(self._rank)
        if first is None or values.device.type != "cpu" or not values.is_contiguous():
            return None
        return values.view(-1)[first : first + count]

    def _read(self, piece: Piece, data: torch.Tensor) -> None:
        leaf = piece.leaf
        if isinstance(leaf, InFile):
            leaf.fill(self._files, piece.first, schema.as_bytes(data))
        else:
            data.copy_(leaf.read(piece.first, piece.last))
        if data.dtype == torch.bool and data.numel() and int(data.view(torch.uint8).max()) > 1:
            msg = f"a truth value in {piece.extent or 'a file'} is stored as another byte than 0 or 1"
            raise CheckpointError(msg)
        self._sum(piece, schema.as_bytes(data))

    def _is_mapped(self, piece: Piece) -> bool:
        """True if all of a piece is mapped here; of others, pages would count that are no part of the slice."""
        mapped = self._pairs[piece.pair].mapped if piece.pair >= 0 else None
        return mapped is not None and mapped.first <= piece.at and piece.at + piece.last - piece.first <= mapped.last

    def _check(self, piece: Piece, leaf: InFile) -> None:
        """Compare a piece with its checksum where the file is mapped."""
        data = schema.as_bytes(
            self._files.mapped(leaf.path)[leaf.offset + piece.first * leaf.dtype.itemsize :][: piece.nbytes]
        )
        leaf.check(piece.first, data)
        self._sum(piece, data)

    def _sum(self, piece: Piece, data: memoryview) -> None:
        if piece.extent is not None:
            self._sums.append(
                Sum(piece.extent, piece.first * piece.leaf.dtype.itemsize, piece.nbytes, zlib.crc32(data))
            )

    def _place(self, current: Round, turn: int, buffers: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Take this rank's elements out of its buffers and of all shared ones."""
        for piece, buffer in buffers:
            self._take(piece, buffer[: piece.nbytes])
        for number, slot in enumerate(current.slots):
            memory = self._slot(turn, number)
            for piece, start in zip(slot.pieces, slot.starts, strict=True):
                self._take(piece, memory[start : start + piece.nbytes])

    def _take(self, piece: Piece, raw: torch.Tensor) -> None:
        if piece.pair < 0:
            return
        pair = self._pairs[piece.pair]
        route = pair.routes[piece.shard]
        if pair.mapped is None and route.is_used(piece.at, piece.at + piece.last - piece.first):
            route.place(pair.target.storage(self._rank), piece.at, raw.view(piece.leaf.dtype))

    def _meet(self, current: Round, turn: int, failures: Failures) -> None:
        """Meet all ranks when the buffers are full; none of them reads further if one failed. Collective over: node."""
        self._agree(failures)
        if not self._is_shared:
            for number, slot in enumerate(current.slots):
                self._node.broadcast(self._slot(turn, number)[: slot.nbytes], slot.reader)

    def _agree(self, failures: Failures) -> None:
        text = failures.text()
        self._node.agree(not text, text, CheckpointError)

    def _slot(self, turn: int, number: int) -> torch.Tensor:
        if self._memory is None:
            msg = "no memory was mapped"
            raise CheckpointError(msg)
        return self._memory[turn % 2, number]

    def _buffer(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.empty(schedule.PIECE_BYTES, dtype=torch.uint8)


def check_sums(node: Comm, sums: Sequence[Sum], expected: dict[Extent, int]) -> None:
    """Compare checksums of ranges that several ranks read.

    Collective over: `node`.

    Raises:
        CheckpointError: the bytes of one do not match; on all ranks.
    """
    found: dict[Extent, list[Sum]] = {}
    for part in (part for rows in node.gather_objects(list(sums)) for part in rows):
        found.setdefault(part.extent, []).append(part)
    for extent in sorted(found):
        crc = 0
        for part in sorted(found[extent], key=lambda part: part.first):
            crc = crc32.combine(crc, part.crc, part.nbytes)
        if crc != expected[extent]:
            msg = (
                f"{extent[0]} is damaged: bytes {extent[1]} to {extent[2]} do not match their checksum; fetch it again"
            )
            error = CheckpointError(msg)
            error.is_collective = True
            raise error
