"""Checksums of blocks of a file that several ranks write in pieces of any size.

Each rank takes checksums of what it writes, cut at the borders of blocks; those of one block are combined when all are
there. That they meet without gaps shows that every byte was written, and once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mpispeed.native.checksum import crc32c, crc32c_combine
from mpispeed.tokens_build.errors import BuildError

Pieces = npt.NDArray[np.void]

PIECE = np.dtype([("start", "<u8"), ("size", "<u8"), ("sum", "<u4")])
"""Checksum of a piece that lies in one block; `start` in bytes from the start of the dataset."""


class BlockSums:
    """Checksums of the pieces of one dataset that this rank writes."""

    def __init__(self, block_bytes: int) -> None:
        self._block = block_bytes
        self._pieces: list[tuple[int, int, int]] = []

    def add(self, start: int, values: npt.NDArray[np.generic]) -> int:
        """Take checksums of `values`, which go to byte `start` of the dataset; returns that of all of them."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        whole = at = 0
        while at < len(raw):
            stop = min(len(raw), at + self._block - (start + at) % self._block)
            own = crc32c(raw[at:stop])
            self._take(start + at, stop - at, own)
            whole = crc32c_combine(whole, own, stop - at)
            at = stop
        return whole

    def _take(self, start: int, size: int, own: int) -> None:
        if self._pieces:
            before, length, crc = self._pieces[-1]
            if before + length == start and before // self._block == start // self._block:
                self._pieces[-1] = before, length + size, crc32c_combine(crc, own, size)
                return
        self._pieces.append((start, size, own))

    def pieces(self) -> Pieces:
        """What was taken, for `combine`. Shapes: PIECE [P]."""
        return np.array(self._pieces, PIECE)


def combine(found: Iterable[Pieces], nbytes: int, block_bytes: int) -> npt.NDArray[np.uint32]:
    """The checksum of each block of a dataset of `nbytes`, from the pieces of all ranks.

    Shapes: found: arrays of PIECE; the result: u4, one for each block; the last block may be short.

    Raises:
        BuildError: pieces leave gaps or overlap.
    """
    parts = np.concatenate([np.empty(0, PIECE), *found])
    parts = parts[np.argsort(parts["start"], kind="stable")]
    starts, sizes = parts["start"].astype(np.int64), parts["size"].astype(np.int64)
    ends = np.cumsum(sizes)
    if not np.array_equal(starts, ends - sizes) or (int(ends[-1]) if len(ends) else 0) != nbytes:
        msg = f"the pieces of a dataset of {nbytes} bytes do not meet; this is a fault of mpispeed, please report it"
        raise BuildError(msg)
    sums = np.zeros(-(-nbytes // block_bytes), np.uint32)
    for block, size, own in zip((starts // block_bytes).tolist(), sizes.tolist(), parts["sum"].tolist(), strict=True):
        sums[block] = crc32c_combine(int(sums[block]), own, size)
    return sums
