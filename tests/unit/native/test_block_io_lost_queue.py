"""A queue of the kernel that fails while requests are in it: errors once, then system calls."""

from __future__ import annotations

import errno

import pytest

from mpispeed.native import block_file, block_io
from mpispeed.native.block_io import BlockFile, BlockIO, Options, aligned
from tests.helpers.files import FOLDERS, bytes_of, fresh_folder, noise

QUEUES = [name for name in ("queue", "uring") if not block_file.kernel_refusal(name)]
SIZE, BLOCK = 1 << 20, 16384


@pytest.fixture(params=[folder for folder in FOLDERS if block_io.probe(folder).is_direct])
def file(request):
    with fresh_folder(request.param) as folder:
        (folder / "filled").write_bytes(bytes_of(noise(SIZE)))
        with BlockFile(folder / "filled") as opened:
            yield opened


@pytest.fixture(autouse=True)
def no_faults_left():
    yield
    for op in ("submit", "reap"):
        block_io.inject(op, nth=0)


def check_that_it_goes_on(io, file):
    for seed in range(3):
        written, back = noise(SIZE, seed), aligned(SIZE)
        io.write(file, written).wait()
        io.read(file, back).wait()
        assert bytes_of(back) == bytes_of(written)


@pytest.mark.parametrize("backend", QUEUES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("op", ["read", "write"])
def test_failed_reap(file, backend, overlap, op):
    options = Options(BLOCK, queue_depth=8, threads=1, overlap_events=overlap, backend=backend)
    with BlockIO(options) as io:
        block_io.inject("reap", nth=2, errno=errno.EIO)
        buffer = aligned(SIZE)
        transfer = getattr(io, op)(file, buffer)
        with pytest.raises(OSError, match="failed at offset") as caught:
            transfer.wait()
        assert caught.value.errno == errno.EIO
        buffer.fill_(3)  # the kernel is done with it
        check_that_it_goes_on(io, file)
        assert bytes_of(buffer) == b"\3" * SIZE


@pytest.mark.parametrize("backend", QUEUES)
def test_failed_reap_with_a_batch_half_submitted(file, backend):
    """The requests of the batch that the kernel has not got yet are finished once, by system calls."""
    with BlockIO(Options(BLOCK, queue_depth=8, threads=1, single_submit=True, backend=backend)) as io:
        block_io.inject("submit", nth=4, errno=errno.EAGAIN)
        block_io.inject("reap", nth=1, errno=errno.EIO)
        transfer = io.read(file, aligned(SIZE))
        with pytest.raises(OSError, match="failed at offset 0") as caught:
            transfer.wait()
        assert caught.value.errno == errno.EIO
        assert io.counters.requests_read == 8
        assert io.counters.bytes_read == 5 * BLOCK
        check_that_it_goes_on(io, file)


def test_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="not in"):
        block_io.inject("seek")
