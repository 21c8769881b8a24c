"""Transfers of block I/O with their times."""

from __future__ import annotations

import time

from mpispeed.native.block_io import BlockFile, BlockIO, Options, aligned


def test_noted_transfers_are_those_between_beginning_and_end(tmp_path):
    with BlockIO(Options(block_size=8192)) as io, BlockFile(tmp_path / "noted", create=True) as file:
        buffer = aligned(40_000).fill_(3)
        io.write(file, buffer).wait()
        end, before = io.note(), time.perf_counter()
        io.write(file, buffer).wait()
        io.read(file, buffer[:10_000], 5_000).wait()
        noted, after = end(), time.perf_counter()
        io.read(file, buffer).wait()
        assert [(one.is_write, one.nbytes) for one in noted] == [(True, 40_000), (False, 10_000)]
        assert before <= noted[0].begin <= noted[0].end <= noted[1].begin <= noted[1].end <= after
        assert end() == noted
