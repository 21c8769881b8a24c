"""The I/O handle: return codes, bytes, offsets and the three kinds of buffers, on a disk and in memory."""

from __future__ import annotations

import errno
import itertools
import logging
import resource

import pytest
import torch

from mpispeed.aio import aio_handle, aio_read, aio_write, memcpy
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compat import aio
from mpispeed.native import block_io
from tests.helpers.files import FOLDERS, bytes_of, fresh_folder, noise, open_descriptors

BLOCK, DEPTH, IO_SIZE, THREADS = 1024, 2, 4096, 2
SUBMITS = list(itertools.product([False, True], [False, True]))
KINDS = ["locked", "unpinned"] + (["pinned"] if torch.cuda.is_available() else [])


@pytest.fixture(params=FOLDERS)
def folder(request):
    with fresh_folder(request.param) as made:
        yield made


@pytest.fixture(params=SUBMITS, ids=str)
def handle(request):
    made = aio_handle(BLOCK, DEPTH, *request.param, THREADS)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def faults_are_gone():
    yield
    block_io.inject_latency(0)


@pytest.fixture(params=KINDS)
def buffer(request, handle):
    """Makes buffers of one kind, with the given content."""

    def make(content):
        example = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if request.param == "unpinned":
            return example
        if request.param == "pinned":
            return example.pin_memory()
        return handle.new_cpu_locked_tensor(len(content), example).copy_(example)

    return make


def content(seed=0, nbytes=IO_SIZE):
    return bytes_of(noise(nbytes, seed))


def reference(folder, name="reference", seed=0, nbytes=IO_SIZE):
    path = folder / name
    path.write_bytes(content(seed, nbytes))
    return str(path)


@pytest.mark.parametrize("flags", SUBMITS)
def test_getters(flags):
    handle = aio_handle(BLOCK, DEPTH, *flags, THREADS)
    assert handle.get_block_size() == BLOCK
    assert handle.get_queue_depth() == DEPTH
    assert (handle.get_single_submit(), handle.get_overlap_events()) == flags
    assert handle.get_intra_op_parallelism() == THREADS
    handle.close()


def test_defaults():
    handle = aio_handle()
    found = (handle.get_block_size(), handle.get_queue_depth(), handle.get_single_submit())
    assert found == (1048576, 128, False)
    assert (handle.get_overlap_events(), handle.get_intra_op_parallelism()) == (False, 1)
    handle.close()


def test_sync_read(folder, handle, buffer):
    x = buffer(bytes(IO_SIZE))
    assert handle.sync_pread(x, reference(folder)) == 1
    assert bytes_of(x) == content()


def test_async_read(folder, handle, buffer):
    x = buffer(bytes(IO_SIZE))
    assert handle.async_pread(x, reference(folder)) == 0
    assert handle.wait() == 1
    assert bytes_of(x) == content()


def test_sync_write(folder, handle, buffer):
    path = folder / "written"
    assert handle.sync_pwrite(buffer(content()), str(path)) == 1
    assert path.read_bytes() == content()
    assert path.stat().st_mode & 0o777 == 0o600


def test_async_write(folder, handle, buffer):
    path = folder / "written"
    assert handle.async_pwrite(buffer(content()), str(path)) == 0
    assert handle.wait() == 1
    assert path.read_bytes() == content()


@pytest.mark.parametrize("count", [2, 3])
def test_queues_of_reads_and_writes(folder, handle, buffer, count):
    targets = [buffer(bytes(IO_SIZE)) for _ in range(count)]
    for seed, x in enumerate(targets):
        assert handle.async_pread(x, reference(folder, f"in-{seed}", seed)) == 0
    assert handle.wait() == count
    assert [bytes_of(x) for x in targets] == [content(seed) for seed in range(count)]
    for seed in range(count):
        assert handle.async_pwrite(buffer(content(seed)), str(folder / f"out-{seed}")) == 0
    assert handle.wait() == count
    assert [(folder / f"out-{seed}").read_bytes() for seed in range(count)] == [content(s) for s in range(count)]


@pytest.mark.parametrize("partition", [[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]])
def test_pieces_at_offsets(folder, handle, buffer, partition):
    whole = content(nbytes=sum(partition) * BLOCK)
    path, start = folder / "pieces", 0
    for blocks in partition:
        piece = whole[start : start + blocks * BLOCK]
        assert handle.sync_pwrite(buffer(piece), str(path), start) == 1
        start += len(piece)
        assert path.read_bytes() == whole[:start]
    start = 0
    for blocks in partition:
        x = buffer(bytes(blocks * BLOCK))
        assert handle.sync_pread(x, str(path), start) == 1
        assert bytes_of(x) == whole[start : start + blocks * BLOCK]
        start += blocks * BLOCK


def test_validated_transfers_and_single_ones(folder, handle, buffer):
    path = str(folder / "checked")
    assert handle.write(buffer(content()), path, True) == 0
    x = buffer(bytes(IO_SIZE))
    assert handle.read(x, path, True) == 0
    assert handle.pread(x, path, True, False) == 1
    assert handle.pwrite(x, path, True, True) == 0
    assert handle.wait() == 1
    with pytest.raises(UsageError, match=f"the file has {IO_SIZE} bytes and the buffer {BLOCK}"):
        handle.read(buffer(bytes(BLOCK)), path, False)


def test_validation_finds_the_first_wrong_byte(folder):
    handle = aio_handle()
    path = folder / "checked"
    assert handle.pwrite(noise(IO_SIZE), str(path), True, True) == 0
    handle._io.close()  # what was queued is in the file
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="differs from the buffer at offset 1234"):
        handle.wait()
    handle.close()


def test_wait_without_anything_pending(handle):
    assert handle.wait() == 0
    assert handle.wait() == 0


def test_zero_length(folder, handle):
    empty = torch.empty(0)
    assert handle.sync_pwrite(empty, str(folder / "empty")) == 1
    assert (folder / "empty").read_bytes() == b""
    assert handle.sync_pread(empty, str(folder / "empty")) == 1


def test_bytes_that_do_not_divide(folder, handle, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    odd = noise(IO_SIZE + 1)
    assert handle.sync_pwrite(odd, str(folder / "odd")) == -1
    assert "4097 bytes are no multiple of intra_op_parallelism 2" in caplog.text
    one = aio_handle(BLOCK, DEPTH)
    assert one.sync_pwrite(odd, str(folder / "odd")) == 1
    assert (folder / "odd").read_bytes() == bytes_of(odd)
    one.close()


def test_missing_file(folder, handle, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    x = noise(IO_SIZE)
    assert handle.sync_pread(x, str(folder / "missing")) == -1
    assert handle.async_pread(x, str(folder / "missing")) == -1
    assert handle.read(x, str(folder / "missing"), False) == -1
    assert handle.sync_pwrite(x, str(folder / "missing" / "below")) == -1
    assert "No such file or directory" in caplog.text
    assert handle.wait() == 0


def test_reading_past_the_end(folder, handle, buffer):
    path = reference(folder)
    x = buffer(b"\7" * (2 * IO_SIZE))
    assert handle.sync_pread(x, path) == 1
    assert bytes_of(x) == content() + b"\7" * IO_SIZE
    with pytest.raises(OSError, match="past the end"):
        handle.sync_pread(x, path, IO_SIZE)
    assert handle.wait() == 0


def test_longer_files_are_cut_by_whole_writes_only(folder, handle):
    path = folder / "long"
    path.write_bytes(content(1, 4 * IO_SIZE))
    assert handle.sync_pwrite(noise(IO_SIZE), str(path), 0) == 1
    assert path.read_bytes() == content() + content(1, 4 * IO_SIZE)[IO_SIZE:]
    assert handle.sync_pwrite(noise(IO_SIZE), str(path)) == 1
    assert path.read_bytes() == content()
    keeping = aio_handle(truncate=False)
    assert keeping.sync_pwrite(noise(BLOCK, 2), str(path)) == 1
    assert path.read_bytes() == content(2, BLOCK) + content()[BLOCK:]
    keeping.close()


def test_unpinned_sources_may_change_before_wait(folder, handle):
    x = noise(IO_SIZE)
    plain = torch.frombuffer(bytearray(content()), dtype=torch.uint8)
    block_io.inject_latency(0.02)
    assert handle.async_pwrite(plain, str(folder / "copied")) == 0
    plain.zero_()
    assert handle.wait() == 1
    assert (folder / "copied").read_bytes() == bytes_of(x)


def test_unpinned_targets_change_in_wait(folder, handle):
    path = reference(folder)
    x = torch.zeros(IO_SIZE, dtype=torch.uint8)
    handle.async_pread(x, path)
    assert not x.any()
    handle.wait()
    assert bytes_of(x) == content()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_typed_and_strided_tensors(folder, handle, dtype):
    source = torch.arange(2048).reshape(32, 64).to(dtype).t()
    assert handle.sync_pwrite(source, str(folder / "typed")) == 1
    target = torch.zeros(32, 64, dtype=dtype).t()
    assert handle.sync_pread(target, str(folder / "typed")) == 1
    assert torch.equal(source, target)
    assert (folder / "typed").read_bytes() == bytes_of(source)


def test_every_failure_is_reported_and_the_rest_is_done(folder, handle, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    path, x = reference(folder), torch.zeros(IO_SIZE, dtype=torch.uint8)
    for offset in (IO_SIZE, 2 * IO_SIZE):
        handle.async_pread(torch.zeros(BLOCK, dtype=torch.uint8), path, offset)
    handle.async_pread(x, path)
    with pytest.raises(OSError, match=f"at offset {IO_SIZE} reaches past the end") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    assert f"at offset {2 * IO_SIZE} reaches past" in caplog.text
    assert bytes_of(x) == content()
    assert handle.wait() == 0


def test_locked_tensors(handle):
    x = handle.new_cpu_locked_tensor(1000, torch.zeros(1, dtype=torch.bfloat16))
    assert (x.dtype, x.shape, x.data_ptr() % 4096) == (torch.bfloat16, (1000,), 0)
    assert handle.free_cpu_locked_tensor(x[1:]) is False
    assert handle.free_cpu_locked_tensor(x) is True
    assert handle.free_cpu_locked_tensor(x) is False
    assert handle.free_cpu_locked_tensor(torch.zeros(10)) is False
    x.fill_(1)  # the memory stays as long as it is looked at


def test_lock_limit_is_a_warning(handle, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)
    monkeypatch.setattr("mpispeed.base.log._seen", set())
    monkeypatch.setattr(aio, "lock_memory", lambda memory: "the limit is small")
    x = handle.new_cpu_locked_tensor(4096, torch.zeros(1))
    assert x.numel() == 4096
    assert "16384 bytes are not page-locked: the limit is small" in caplog.text
    assert handle.free_cpu_locked_tensor(x)


def test_pages_are_really_locked(handle):
    def locked_kilobytes():
        with open("/proc/self/status") as file:  # noqa: PTH123
            return next(int(line.split()[1]) for line in file if line.startswith("VmLck"))

    before = locked_kilobytes()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert limit == resource.RLIM_INFINITY or limit >= 65536 + 1024 * before, f"RLIMIT_MEMLOCK is {limit}"
    x = handle.new_cpu_locked_tensor(65536, torch.zeros(1, dtype=torch.uint8))
    assert torch.cuda.is_available() or locked_kilobytes() == before + 64
    handle.free_cpu_locked_tensor(x)
    assert locked_kilobytes() == before


def test_two_handles_and_no_descriptor_left(folder):
    before = open_descriptors()
    one, two = aio_handle(BLOCK, DEPTH), aio_handle(BLOCK, DEPTH, False, True, THREADS)
    path = reference(folder)
    a, b = noise(IO_SIZE, 7), noise(IO_SIZE, 8)
    one.async_pread(a, path)
    two.async_pread(b, path)
    two.async_pwrite(noise(IO_SIZE, 9), str(folder / "other"))
    assert (one.wait(), two.wait()) == (1, 2)
    assert bytes_of(a) == bytes_of(b) == content()
    one.async_pwrite(noise(IO_SIZE), str(folder / "late"))
    one.close(), two.close()
    assert (folder / "late").read_bytes() == content()
    assert open_descriptors() == before


def test_ten_thousand_operations(folder):
    handle = aio_handle(4096, 8, False, True)
    path = str(folder / "many")
    x = handle.new_cpu_locked_tensor(10_000 * 16, torch.zeros(1, dtype=torch.uint8))
    y = handle.new_cpu_locked_tensor(10_000 * 16, torch.zeros(1, dtype=torch.uint8))
    x.copy_(noise(x.numel()))
    for start in range(0, x.numel(), 32):
        assert handle.async_pwrite(x[start : start + 32], path, start) == 0
    assert handle.wait() == 5_000
    for start in range(0, x.numel(), 32):
        assert handle.async_pread(y[start : start + 32], path, start) == 0
    assert handle.wait() == 5_000
    assert torch.equal(x, y)
    handle.close()


def test_one_shot_calls(folder):
    x, y = noise(IO_SIZE), torch.zeros(IO_SIZE, dtype=torch.uint8)
    path = str(folder / "once")
    assert aio_write(x, path, BLOCK, DEPTH, False, True, True) == 0
    assert aio_read(y, path, validate=True) == 0
    assert torch.equal(x, y)
    assert aio_read(y, str(folder / "missing")) == -1
    assert memcpy(y.zero_(), x) == 0
    assert torch.equal(x, y)
    with pytest.raises(UsageError, match="dest has 4096 bytes and src 4095"):
        memcpy(y, x[1:])


def test_wrong_numbers():
    with pytest.raises(ConfigError, match="queue_depth is 0"):
        aio_handle(1024, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_device_tensors(folder, handle):
    x = noise(IO_SIZE).cuda()
    assert handle.sync_pwrite(x, str(folder / "device")) == 1
    y = torch.zeros_like(x)
    assert handle.sync_pread(y, str(folder / "device")) == 1
    assert torch.equal(x, y)
