"""Block I/O against plain reads and writes, with faults, signals, forks and every backend."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native import block_file, block_io
from mpispeed.native.block_io import BlockFile, BlockIO, Options, aligned, probe
from tests.helpers.files import FOLDERS, buffer_at, bytes_of, fresh_folder, noise, open_descriptors
from tests.helpers.system import cannot, with_own_mounts
from tests.zoo import same_bits

BACKENDS = [name for name in ("threads", "queue", "uring") if name == "threads" or not block_file.kernel_refusal(name)]
SIZE = 1 << 18


@pytest.fixture(params=FOLDERS)
def folder(request):
    with fresh_folder(request.param) as made:
        yield made


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def no_faults_left():
    yield
    for op in ("read", "write"):
        block_io.inject(op, nth=0)
    block_io.inject_latency(0)


def count_threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def filled(folder, nbytes=SIZE, **options):
    """(file, its bytes)."""
    content = bytes_of(noise(nbytes))
    path = folder / "filled"
    path.write_bytes(content)
    return BlockFile(path, **options), content


def test_some_folder_has_direct_files():
    assert any(probe(folder).is_direct for folder in FOLDERS), [probe(folder).direct_reason for folder in FOLDERS]


def test_kernel_queue_is_tested_where_the_kernel_has_it():
    """Where it has not, the tests of this file run with threads alone."""
    if "queue" not in BACKENDS:
        cannot(block_file.kernel_refusal("queue"))


STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.one_of(st.integers(0, 50_000), st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 65536])),
        st.one_of(st.integers(0, SIZE), st.integers(0, SIZE // 4096).map(lambda page: page * 4096)),
        st.sampled_from([0, 1, 4, 64, 512, 4095]),
    ),
    max_size=12,
)


@pytest.mark.parametrize("direct", [None, False])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    block=st.sampled_from([512, 4096, 10_000, 1 << 20]),
    depth=st.integers(1, 5),
    threads=st.integers(1, 3),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_any_range_and_address_as_plain_files_do(folder, backend, direct, steps, block, depth, threads, flags):
    path = folder / "any"
    path.unlink(missing_ok=True)
    expected = bytearray(SIZE + 50_000)
    options = Options(block, depth, threads, *flags, backend)
    with BlockIO(options) as io, BlockFile(path, create=True, direct=direct) as file:
        file.allocate(len(expected))
        for seed, (is_write, nbytes, offset, shift) in enumerate(steps):
            nbytes = min(nbytes, len(expected) - offset)
            if is_write:
                buffer = noise(nbytes, seed, shift)
                expected[offset : offset + nbytes] = bytes_of(buffer)
                io.write(file, buffer, offset).wait()
            else:
                around = buffer_at(nbytes + 2, shift).fill_(7)
                io.read(file, around[1:-1], offset).wait()
                assert bytes_of(around) == b"\7" + expected[offset : offset + nbytes] + b"\7"
        assert path.read_bytes() == expected


def test_transfers_under_way_together(folder, backend):
    pieces = [noise(n, seed) for seed, n in enumerate([1, 5000, 65536, 100_001, 4096, 262_144] * 4)]
    with BlockIO(Options(block_size=8192, threads=2, backend=backend)) as io:
        with BlockFile(folder / "together", create=True) as file:
            starts = [sum(piece.numel() for piece in pieces[:i]) for i in range(len(pieces))]
            for transfer in [io.write(file, piece, start) for piece, start in zip(pieces, starts, strict=True)]:
                transfer.wait()
            back = [torch.empty_like(piece) for piece in pieces]
            transfers = [io.read(file, piece, start) for piece, start in zip(back, starts, strict=True)]
            for transfer in reversed(transfers):
                transfer.wait()
        total = sum(piece.numel() for piece in pieces)
        same_bits(pieces, back)
        assert (io.counters.bytes_read, io.counters.bytes_written) == (total, total)
        assert io.counters.requests_read >= total // 8192


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_buffers_of_any_dtype_and_shape(folder, dtype):
    x = torch.arange(3000).reshape(30, 100).to(dtype)
    with BlockIO() as io, BlockFile(folder / "typed", create=True) as file:
        assert io.write(file, x).nbytes == x.nbytes
        y = torch.zeros_like(x)
        io.write(file, x).wait()
        io.read(file, y).wait()
    assert torch.equal(x, y)


def test_ten_thousand_small_ones(folder, backend):
    file, content = filled(folder)
    back = aligned(SIZE)
    with file, BlockIO(Options(block_size=4096, threads=2, backend=backend)) as io:
        transfers = []
        for i in range(10_000):
            start = i * 37 % (SIZE - 64)
            transfers.append((start, io.read(file, back[i * 16 : i * 16 + 16], start)))
        for _, transfer in transfers:
            transfer.wait()
        for i, (start, _) in enumerate(transfers):
            assert bytes_of(back[i * 16 : i * 16 + 16]) == content[start : start + 16]
        assert io.counters.bytes_read == 160_000


def test_two_at_once_and_no_descriptor_left(folder, backend):
    gc.collect()
    before = open_descriptors()
    threads = count_threads()
    file, content = filled(folder)
    with BlockIO(Options(backend=backend)) as one, BlockIO(Options(backend=backend, threads=3)) as two:
        a, b = aligned(SIZE), aligned(SIZE - 5)
        first, second = one.read(file, a), two.read(file, b, 5)
        first.wait(), second.wait()
    assert bytes_of(a) == content
    assert bytes_of(b) == content[5:]
    file.close()
    assert open_descriptors() == before
    deadline = time.monotonic() + 60
    while count_threads() > threads and time.monotonic() < deadline:  # the kernel ends those of io_uring by itself
        time.sleep(0.01)
    assert count_threads() <= threads  # fewer where those of a test before had not ended yet


def test_dropped_objects_clean_up(folder, backend):
    gc.collect()
    before = open_descriptors()
    io = BlockIO(Options(backend=backend, block_size=4096))
    file = BlockFile(folder / "dropped", create=True)
    io.write(file, noise(SIZE + 3))
    del io, file
    gc.collect()
    assert open_descriptors() == before
    assert (folder / "dropped").read_bytes() == bytes_of(noise(SIZE + 3))


def test_close_waits_for_what_is_under_way(folder, backend):
    block_io.inject_latency(0.02)
    io = BlockIO(Options(block_size=32768, queue_depth=2, backend=backend))
    file = BlockFile(folder / "late", create=True)
    transfer = io.write(file, noise(SIZE))
    assert not transfer.is_done()
    io.close()
    assert transfer.is_done()
    transfer.wait()
    transfer.wait()
    file.close()
    assert (folder / "late").read_bytes() == bytes_of(noise(SIZE))
    with pytest.raises(UsageError, match="was closed; make a new one"):
        io.read(file, aligned(1))


def test_file_close_waits_too(folder, backend):
    block_io.inject_latency(0.02)
    with BlockIO(Options(block_size=65536, queue_depth=1, backend=backend)) as io:
        file = BlockFile(folder / "late", create=True)
        transfer = io.write(file, noise(SIZE))
        file.close()
        assert transfer.is_done()
        transfer.wait()
        with pytest.raises(OSError, match="the file was closed") as caught:
            io.read(file, aligned(1))
    assert caught.value.errno == errno.EBADF


def test_requests_are_in_flight_together(folder, backend):
    file, _ = filled(folder)
    block_io.inject_latency(0.05)
    times = {}
    for depth, tries in ((1, 1), (8, 4)):
        with BlockIO(Options(block_size=SIZE // 8, queue_depth=depth, backend=backend)) as io:
            for _ in range(tries):  # a busy machine makes each slower, and none faster
                began = time.perf_counter()
                io.read(file, aligned(SIZE)).wait()
                times[depth] = min(times.get(depth, 60.0), time.perf_counter() - began)
    file.close()
    if backend != "threads" and not probe(folder).is_direct:
        return
    assert times[1] >= 8 * 0.05
    assert times[8] < times[1] / 2


def test_memory_is_kept_until_the_transfer_is_done(folder, backend):
    block_io.inject_latency(0.05)
    with BlockIO(Options(backend=backend)) as io, BlockFile(folder / "kept", create=True) as file:
        transfer = io.write(file, noise(SIZE, 5))
        gc.collect()
        spoil = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(8)]
        transfer.wait()
        assert len(spoil) == 8
    assert (folder / "kept").read_bytes() == bytes_of(noise(SIZE, 5))


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_injected_error_is_raised_each_time(folder, backend, op, code):
    file, content = filled(folder)
    with file, BlockIO(Options(block_size=16384, backend=backend, queue_depth=2)) as io:
        block_io.inject(op, nth=3, errno=code)
        transfer = getattr(io, op)(file, aligned(SIZE))
        for _ in range(2):
            with pytest.raises(OSError, match=f"{SIZE} bytes at offset 0 failed at offset") as caught:
                transfer.wait()
            assert (caught.value.errno, caught.value.filename) == (code, str(folder / "filled"))
        back = aligned(4096)
        io.read(file, back, SIZE - 4096).wait()
        if op == "read":
            assert bytes_of(back) == content[-4096:]


@pytest.mark.parametrize("after", [1, 4096, 5000])
def test_short_transfers_go_on(folder, backend, after):
    file, content = filled(folder)
    with file, BlockIO(Options(block_size=16384, backend=backend)) as io:
        for shift in (0, 1):
            back = buffer_at(SIZE, shift)
            block_io.inject("read", nth=2, after_bytes=after)
            io.read(file, back).wait()
            assert bytes_of(back) == content
            block_io.inject("write", nth=2, after_bytes=after)
            io.write(file, noise(SIZE, 3, shift)).wait()
            assert (folder / "filled").read_bytes() == bytes_of(noise(SIZE, 3))
            io.write(file, torch.frombuffer(bytearray(content), dtype=torch.uint8)).wait()


def test_interrupted_and_refused_calls_are_repeated(folder, backend):
    file, content = filled(folder)
    with file, BlockIO(Options(block_size=16384, backend=backend)) as io:
        for code in (errno.EINTR, errno.EAGAIN):
            back = aligned(SIZE)
            block_io.inject("read", nth=2, errno=code)
            io.read(file, back).wait()
            assert bytes_of(back) == content


def test_short_then_failing(folder, backend):
    with BlockIO(Options(backend=backend)) as io, BlockFile(folder / "full", create=True) as file:
        block_io.inject("write", after_bytes=8192, errno=errno.ENOSPC)
        with pytest.raises(OSError, match=r"No space left on device.*failed at offset 8192") as caught:
            io.write(file, noise(SIZE)).wait()
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(("nbytes", "offset"), [(8192, SIZE - 4096), (4096, SIZE), (10, SIZE - 5), (1, 10 * SIZE)])
@pytest.mark.parametrize("length", [SIZE, SIZE - 1])
def test_reading_past_the_end_is_an_error(folder, backend, nbytes, offset, length):
    file, _ = filled(folder, length)
    with file, BlockIO(Options(backend=backend)) as io:
        transfer = io.read(file, aligned(nbytes), offset)
        with pytest.raises(OSError, match=f"past the end: the file is {length} bytes long") as caught:
            transfer.wait()
        assert caught.value.errno == errno.EIO


def test_writing_a_file_opened_for_reading(folder, backend):
    file, content = filled(folder, readonly=True)
    with file, BlockIO(Options(backend=backend)) as io:
        for nbytes in (SIZE, 100):
            with pytest.raises(OSError, match="Bad file descriptor") as caught:
                io.write(file, aligned(nbytes)).wait()
            assert caught.value.errno == errno.EBADF
    assert (folder / "filled").read_bytes() == content


def in_a_fork(work):
    """What `work` gives, as text, run in a forked process; there torch must not start threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = repr(work())
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert os.waitpid(child, 0)[1] == 0, said
    return said


def test_limit_on_file_size_is_an_error_not_a_signal(folder, backend):
    def write_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        options = Options(backend=backend, block_size=16384)
        with BlockIO(options) as io, BlockFile(folder / "limited", create=True) as file:
            for call in (io.write(file, aligned(131072)).wait, lambda: file.allocate(131072)):
                try:
                    call()
                except OSError as error:
                    found.append((error.errno, error.filename))
        return found

    found = []
    assert in_a_fork(write_too_much) == repr([(errno.EFBIG, str(folder / "limited"))] * 2)


def test_full_file_system():
    """A tmpfs of 1 MiB in a mount namespace of its own, where the kernel lets users have one."""
    code = """
import errno, subprocess, sys
from mpispeed.native.block_io import *
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"], check=True)
for number, backend in enumerate(sys.argv[1:]):
    with BlockIO(Options(backend=backend, block_size=65536)) as io, BlockFile(f"/mnt/{number}", create=True) as f:
        try:
            io.write(f, aligned(2 << 20)).wait()
        except OSError as error:
            print(errno.errorcode[error.errno], error.filename)
        f.truncate(0)
        try:
            f.allocate(2 << 20)
        except OSError as error:
            print(errno.errorcode[error.errno], error.filename)
        f.truncate(0)
"""
    words = [*with_own_mounts(), sys.executable, "-c", code, *BACKENDS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    expected = [f"ENOSPC /mnt/{number}" for number in range(len(BACKENDS)) for _ in range(2)]
    assert done.stdout.splitlines() == expected, done.stderr


def test_signals_during_transfers(folder, backend):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        block_io.inject_latency(0.005)
        options = Options(block_size=8192, queue_depth=2, backend=backend)
        with BlockIO(options) as io, BlockFile(folder / "signals", create=True) as file:
            io.write(file, noise(SIZE)).wait()
            back = aligned(SIZE)
            io.read(file, back).wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert torch.equal(back, noise(SIZE))


def test_wait_can_be_interrupted(folder):
    def stop(*_):
        raise InterruptedError

    file, content = filled(folder)
    before = signal.signal(signal.SIGALRM, stop)
    back = aligned(SIZE)
    try:
        block_io.inject_latency(1.0)
        with file, BlockIO() as io:
            transfer = io.read(file, back)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError):
                transfer.wait()
            assert not transfer.is_done()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bytes_of(back) == content


def test_fork_with_transfers_under_way(folder, backend):
    def use_it():
        refused = []
        for call in (transfer.wait, lambda: io.read(file, aligned(1))):
            try:
                call()
            except UsageError as error:
                refused.append("fork" in str(error))
        io.close()
        file.close()
        with BlockFile(folder / "forked") as mine, BlockIO(Options(backend=backend)) as new:
            new.read(mine, aligned(0)).wait()
        return refused

    block_io.inject_latency(0.5)
    with BlockIO(Options(backend=backend)) as io, BlockFile(folder / "forked", create=True) as file:
        transfer = io.write(file, noise(SIZE))
        assert in_a_fork(use_it) == "[True, True]"
        transfer.wait()
        back = aligned(SIZE)
        io.read(file, back).wait()
    assert torch.equal(back, noise(SIZE))


def test_exit_without_close_writes_all(folder):
    code = f"""
from mpispeed.native import block_io
from mpispeed.native.block_io import *
block_io.inject_latency(0.1)
handles = [BlockIO(Options(backend=name, block_size=65536)) for name in {BACKENDS!r}]
for io in handles:
    io.write(BlockFile({str(folder)!r} + "/" + io.backend, create=True), aligned({SIZE}) + 1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
    for name in BACKENDS:
        assert (folder / name).read_bytes() == b"\1" * SIZE


def test_arguments_are_checked(folder):
    file, _ = filled(folder)
    with file, BlockIO() as io:
        with pytest.raises(ValueError, match="contiguous"):
            io.read(file, torch.zeros(4, 4).t()[1:])
        with pytest.raises(ValueError, match="no range of a file"):
            io.read(file, aligned(4), -1)
        with pytest.raises(ValueError, match="no range of a file"):
            io.write(file, aligned(4), (1 << 63) - 2)
    for wrong in ({"block_size": 0}, {"queue_depth": 0}, {"threads": -1}, {"backend": "libaio"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Options(**wrong)
    with pytest.raises(ValueError, match="negative"):
        aligned(-1)


def test_auto_takes_the_queue_for_direct_files(folder):
    with BlockIO() as io:
        assert (io.backend == "queue") == (not block_file.kernel_refusal("queue"))
    found = probe(folder)
    assert found is probe(folder)
    assert found.backend == ("queue" if found.is_direct and not block_file.kernel_refusal("queue") else "threads")
    with pytest.raises(FileNotFoundError):
        probe(folder / "missing")
    assert not list(folder.iterdir())


def test_refused_queues_are_explained(monkeypatch):
    """As in a container whose seccomp filter denies the calls."""
    monkeypatch.setattr(block_io, "kernel_refusal", lambda name: f"{name} is denied")
    with BlockIO() as io:
        assert (io.backend, io.reason) == ("threads", "queue is denied")
    with pytest.raises(ConfigError, match='"uring" is not possible here: uring is denied'):
        BlockIO(Options(backend="uring"))


def test_more_queues_than_the_system_grants(folder):
    """fs.aio-max-nr is used up: auto goes on with threads."""
    if "queue" not in BACKENDS:
        cannot(block_file.kernel_refusal("queue"))
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    file, content = filled(folder)
    with file, BlockIO(Options(queue_depth=limit + 1)) as io:
        assert io.backend == "threads"
        assert "Resource temporarily unavailable" in io.reason
        back = aligned(SIZE)
        io.read(file, back).wait()
        assert bytes_of(back) == content
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        BlockIO(Options(queue_depth=limit + 1, backend="queue"))
