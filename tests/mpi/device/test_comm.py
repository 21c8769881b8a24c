"""Verbs on tensors of a device: the results of the host to the bit, in many windows, blocking and started."""

import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends import mapped, pointers
from mpispeed.mesh.collectives import device_collectives, device_verbs
from mpispeed.mesh.compressed.quantized import quantized_all_gather, quantized_reduce_scatter
from tests.helpers.mapped_paths import mapped_paths
from tests.helpers.on_device import noise, same

pytestmark = pytest.mark.mpi(min_size=1)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
COUNTS = (0, 1003)
SMALL = 1 << 10


STAGED = {"many windows": SMALL, "one window": device_collectives.WINDOW_BYTES}


@pytest.fixture(params=[*STAGED, "mapped"])
def window(request, comm, device, monkeypatch):
    """Through the host in small parts or large ones, or through mapped memory in small parts."""
    if request.param in STAGED:
        monkeypatch.setattr(device_collectives, "WINDOW_BYTES", STAGED[request.param])
        yield
        return
    monkeypatch.setattr(mapped, "SLOT_BYTES", 2 * SMALL)
    with mapped_paths(comm, device):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_sums(comm, device, window, count, dtype):
    comm.group.reduction = "ordered"
    scale = 0.375 if dtype.is_floating_point else 1.0
    own, whole = noise(comm.rank, count, dtype), noise(comm.rank, count * comm.size, dtype)
    expected, x = own.clone(), own.to(device)
    comm.all_reduce(expected, scale=scale)
    comm.all_reduce(x, scale=scale)
    assert same(x, expected)
    expected, x = own.clone(), own.to(device)
    comm.reduce(expected, comm.size - 1)
    comm.reduce(x, comm.size - 1)
    assert same(x, expected)
    for out in [dtype, torch.float32] if dtype == torch.bfloat16 else [dtype]:
        expected, x = torch.zeros(count, dtype=out), torch.zeros(count, dtype=out, device=device)
        on_host = torch.zeros(count, dtype=out)
        comm.reduce_scatter(expected, whole.clone(), scale=scale)
        comm.reduce_scatter(x, whole.to(device), scale=scale)
        comm.reduce_scatter(on_host, whole.to(device), scale=scale)
        assert same(x, expected)
        assert same(on_host, expected)
    in_place = whole.to(device)
    cut = in_place[comm.rank * count : (comm.rank + 1) * count]
    comm.reduce_scatter(cut, in_place)
    expected = torch.zeros(count, dtype=dtype)
    comm.reduce_scatter(expected, whole)
    assert same(cut, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_moves(comm, device, window, count, dtype):
    size, rank = comm.size, comm.rank
    own, whole = noise(rank, count, dtype), noise(rank, count * size, dtype)
    expected = torch.cat([noise(r, count, dtype) for r in range(size)])
    for source in (own, own.to(device)):
        out = torch.zeros(count * size, dtype=dtype, device=device)
        comm.all_gather(out, source)
        assert same(out, expected)
    out = torch.zeros(count * size, dtype=dtype, device=device)
    out[rank * count : (rank + 1) * count] = own.to(device)
    comm.all_gather(out, out[rank * count : (rank + 1) * count])
    assert same(out, expected)
    x = own.to(device)
    comm.broadcast(x, size - 1)
    assert same(x, noise(size - 1, count, dtype))
    out, expected = torch.zeros(count * size, dtype=dtype, device=device), torch.zeros(count * size, dtype=dtype)
    comm.all_to_all(out, whole.to(device))
    comm.all_to_all(expected, whole)
    assert same(out, expected)
    counts, out_counts = [j + 1 for j in range(size)], [rank + 1] * size
    source = noise(rank, sum(counts), dtype)
    out, expected = torch.zeros(sum(out_counts), dtype=dtype, device=device), torch.zeros(sum(out_counts), dtype=dtype)
    comm.all_to_all(out, source.to(device), out_counts, counts)
    comm.all_to_all(expected, source, out_counts, counts)
    assert same(out, expected)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("count", COUNTS)
def test_messages(comm, device, window, count):
    """Staged, between a device and a host too: what travels is the same."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for near in (device, torch.device("cpu")) if comm.group.device_path is None else (device,):
        sent, got = noise(comm.rank, count, torch.float32).to(device), torch.zeros(count, device=near)
        arriving = comm.start_recv(got, before, 4)
        comm.start_send(sent, after, 4).wait()
        arriving.wait()
        assert same(got, noise(before, count, torch.float32))
        got.zero_()
        for turn in range(comm.size):  # one pair at a time
            if turn == comm.rank:
                comm.send(sent, after, 5)
            if turn == before:
                comm.recv(got, before, 5)
        assert same(got, noise(before, count, torch.float32))


def test_started_verbs_keep_to_the_order_of_streams(comm, device, window):
    """What was queued before comes first, and what is queued after a wait comes after, without a word to the device."""
    comm.group.reduction = "ordered"
    streams = [torch.get_device_module(device).Stream(device=device) for _ in range(2)]
    for stream in streams:
        with torch.get_device_module(device).stream(stream):
            x = noise(comm.rank, 1003, torch.float32).to(device, non_blocking=True)
            x.mul_(2)
            works = [comm.start_all_reduce(x), comm.start_all_reduce(x, scale=0.5)]
            for work in works:
                work.wait()
            x.add_(1)
        expected = noise(comm.rank, 1003, torch.float32) * 2
        comm.all_reduce(expected)
        comm.all_reduce(expected, scale=0.5)
        stream.synchronize()
        assert same(x, expected + 1)


def test_journal_counts_what_it_counts_on_the_host(comm, device):
    x = torch.ones(1003)
    comm.comm_trace.reset()
    comm.all_reduce(x)
    on_host = comm.comm_trace.total_bytes()
    comm.comm_trace.reset()
    comm.all_reduce(x.to(device))
    assert comm.comm_trace.total_bytes() == on_host


def test_quantized_verbs(comm, device):
    shard, full = noise(comm.rank, 512, torch.float32), noise(comm.rank, 512 * comm.size, torch.float32)
    alone = comm.split(comm.rank, [comm.rank], ("own",))
    out, expected = torch.zeros(512 * comm.size, device=device), torch.zeros(512 * comm.size)
    quantized_all_gather(comm, out, shard.to(device), block=256)
    quantized_all_gather(comm, expected, shard, block=256)
    assert same(out, expected)
    out, expected = torch.zeros(512, device=device), torch.zeros(512)
    quantized_reduce_scatter(comm, alone, out, full.to(device), block=256)
    quantized_reduce_scatter(comm, alone, expected, full, block=256)
    assert same(out, expected)
    alone.close()


def test_refusals(comm, device):
    x = torch.zeros(4, 2, device=device)
    with pytest.raises(CommError, match="contiguous"):
        comm.all_reduce(x.t())
    with pytest.raises(CommError, match="elements"):
        comm.all_gather(torch.zeros(4 * comm.size + 1, device=device), torch.zeros(4))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("chunk_bytes", [1 << 30, 1 << 10])
def test_addresses_are_handed_on_where_that_is_asked_for(comm, monkeypatch, chunk_bytes):
    """On host memory, whose addresses any MPI takes: moves by MPI itself, sums made of them, the bits of the host."""
    finished = []
    monkeypatch.setattr(pointers, "finish", finished.append)
    group = comm.group
    monkeypatch.setattr(group.limits, "chunk_bytes", chunk_bytes)
    path = pointers.PointerPath(group, torch.device("cpu"))
    size, rank, count = comm.size, comm.rank, 1003
    monkeypatch.setattr(group, "device_path", path)
    monkeypatch.setattr(device_verbs, "is_on_device", lambda x: True)
    out, own = torch.zeros(size * count), noise(rank, count, torch.float32)
    device_verbs.all_gather(group, out, own)
    assert torch.equal(out, torch.cat([noise(r, count, torch.float32) for r in range(size)]))
    device_verbs.broadcast(group, own, size - 1)
    assert torch.equal(own, noise(size - 1, count, torch.float32))
    whole, expected = noise(rank, size * count, torch.float32), torch.zeros(size * count)
    device_verbs.all_to_all(group, out, whole, None, None)
    comm.all_to_all(expected, whole)
    assert torch.equal(out, expected)
    after, before = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        polls, _, bring = device_verbs.post_recv(group, out, before, 7)
        device_verbs.send(group, whole, after, 7)
        while not all(poll() for poll in polls):
            pass
        assert bring is None
        assert torch.equal(out, noise(before, size * count, torch.float32))
        assert len(finished) >= 5  # whatever the device was asked to write has to be there before MPI reads
    group.reduction = "ordered"
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        x = noise(rank, size * count, dtype)
        expected = x.clone()
        comm.all_reduce(expected)
        device_verbs.all_reduce(group, x, "sum", 1.0)
        assert same(x, expected)
