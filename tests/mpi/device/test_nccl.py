"""The device path of NCCL over a library of the tests: calls, results of the host to the bit, errors in words."""

import threading

import pytest
import torch

import mpispeed
from mpispeed.base import device as devices
from mpispeed.base.errors import CommError
from mpispeed.mesh.backends import nccl, nccl_comm
from mpispeed.mesh.collectives.group import CommTrace
from tests.helpers import fake_nccl
from tests.helpers.device import stand_in
from tests.helpers.on_device import noise, same

pytestmark = pytest.mark.mpi(min_size=1)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.fixture
def library():
    stand_in()
    with fake_nccl.lend() as lent:
        yield lent


@pytest.fixture
def place(device):
    """The ranks' own device, so that no two share one."""
    return device


@pytest.fixture
def joined(comm, place, library):
    """A group on the path, with lanes between neighbours; each rank's node has a name of its own."""
    made = comm.split(0, comm.ranks, ("joined",), comm_trace=CommTrace())
    made.group.reduction = "ordered"
    made.group.device_path = nccl.open_path(made, place, node=str(comm.rank), has_messages=True)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", (0, 1003, 40_000))
def test_sums_have_the_bits_of_the_host(comm, joined, place, count, dtype):
    scale = 0.375 if dtype.is_floating_point else 1.0
    own, whole = noise(comm.rank, count, dtype), noise(comm.rank, count * comm.size, dtype)
    host = comm.split(0, comm.ranks, ("host",), reduction="ordered")
    expected, x = own.clone(), own.to(place)
    host.all_reduce(expected, scale=scale)
    joined.all_reduce(x, scale=scale)
    assert same(x, expected)
    for out in [dtype, torch.float32] if dtype == torch.bfloat16 else [dtype]:
        expected, x = torch.zeros(count, dtype=out), torch.zeros(count, dtype=out, device=place)
        host.reduce_scatter(expected, whole.clone(), scale=scale)
        joined.reduce_scatter(x, whole.to(place), scale=scale)
        assert same(x, expected)
    host.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", (0, 1003))
def test_moves(comm, joined, place, count, dtype):
    size, rank = comm.size, comm.rank
    own, whole = noise(rank, count, dtype), noise(rank, count * size, dtype)
    everyone = torch.cat([noise(r, count, dtype) for r in range(size)])
    out = torch.zeros(count * size, dtype=dtype, device=place)
    out[rank * count : (rank + 1) * count] = own.to(place)
    joined.all_gather(out, out[rank * count : (rank + 1) * count])
    assert same(out, everyone)
    x = own.to(place)
    joined.broadcast(x, size - 1)
    assert same(x, noise(size - 1, count, dtype))
    expected = torch.zeros(count * size, dtype=dtype)
    joined.all_to_all(out, whole.to(place))
    comm.all_to_all(expected, whole)
    assert same(out, expected)
    counts, out_counts = [j % 2 * (j + 1) for j in range(size)], [rank % 2 * (rank + 1)] * size
    source = noise(rank, sum(counts), dtype)
    out, expected = torch.zeros(sum(out_counts), dtype=dtype, device=place), torch.zeros(sum(out_counts), dtype=dtype)
    joined.all_to_all(out, source.to(place), out_counts, counts)
    comm.all_to_all(expected, source, out_counts, counts)
    assert same(out, expected)


@pytest.mark.ranks(2, 3, 4)
def test_calls_and_their_bytes(comm, joined, place, library):
    """What is handed to the library: one call for a gather, a group for an exchange, no sum where the order is ours."""
    library.forget()
    x = torch.zeros(1003, device=place)
    out = torch.zeros(1003 * comm.size, device=place)
    joined.all_gather(out, x)
    assert library.calls() == [["all_gather", "4012", "-1"]]
    library.forget()
    joined.all_to_all(out, out.clone())
    assert sorted(library.calls()) == sorted(
        [what, "4012", str(peer)] for what in ("send", "recv") for peer in range(comm.size) if peer != comm.rank
    )
    library.forget()
    joined.reduce_scatter(x, out)
    assert {name for name, *_ in library.calls()} == {"send", "recv"}
    library.forget()
    joined.all_reduce(x.long())
    assert library.calls() == [["all_reduce", "8024", "0"]]  # of integers, which any order adds alike


@pytest.mark.ranks(3)
def test_its_own_sums_where_they_are_asked_for(comm, joined, place, library):
    joined.group.reduction = "mpi"
    library.forget()
    x, full = torch.full((5,), 2.0 + comm.rank, device=place), torch.full((15,), 1.0 + comm.rank, device=place)
    joined.all_reduce(x, scale=0.5)
    assert x.cpu().tolist() == [4.5] * 5
    joined.reduce_scatter(x, full, "max")
    assert x.cpu().tolist() == [3.0] * 5
    assert [words[0] for words in library.calls()] == ["all_reduce", "reduce_scatter"]
    half = torch.full((5,), 1.0, device=place, dtype=torch.bfloat16)
    joined.all_reduce(half)
    assert half.cpu().tolist() == [3.0] * 5
    assert [words[0] for words in library.calls()].count("all_reduce") == 1


@pytest.mark.ranks(2, 3, 4)
def test_messages_meet_by_their_tags(comm, joined, place):
    """Sent 1, 2, 3 and asked for as 3, 1, 2, each length its own, around a ring; the buffers may be written at once."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [noise(comm.rank, 10 * tag, torch.float32).to(place) for tag in (1, 2, 3)]
    works = [joined.start_send(x, after, tag) for tag, x in zip((1, 2, 3), sent, strict=True)]
    for x in sent:
        x.zero_()
    got = {tag: torch.zeros(10 * tag, device=place) for tag in (3, 1, 2)}
    works += [joined.start_recv(x, before, tag) for tag, x in got.items()]
    for work in works:
        work.wait()
    for tag, x in got.items():
        assert same(x, noise(before, 10 * tag, torch.float32))


@pytest.mark.ranks(2, 3, 4)
def test_blocking_messages_need_no_order_between_ranks(comm, joined, place):
    """All send first: a message waits on the device for its receiver, not on the host."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (1003, 0):
        x, got = noise(comm.rank, count, torch.float32).to(place), torch.zeros(count, device=place)
        for _ in range(3):
            joined.send(x, after, 5)
        for _ in range(3):
            joined.recv(got, before, 5)
            assert same(got, noise(before, count, torch.float32))


@pytest.mark.ranks(4)
def test_those_who_are_no_neighbours_are_staged(comm, joined, place, library):
    library.forget()
    x, got = torch.full((7,), float(comm.rank), device=place), torch.zeros(7, device=place)
    work = joined.start_send(x, (comm.rank + 2) % 4, 9)
    joined.recv(got, (comm.rank + 2) % 4, 9)
    work.wait()
    assert got.cpu().tolist() == [float((comm.rank + 2) % 4)] * 7
    assert library.calls() == []


@pytest.mark.ranks(2, 3)
def test_a_gpu_takes_one_rank(comm, place, library):
    with pytest.raises(CommError, match=r"NCCL cannot join .*: ranks 0 and [12] share n standin:0"):
        nccl.open_path(comm, torch.device(place.type, 0), node="n")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclSend"])
def test_what_fails_on_one_rank_is_said_by_all(comm, place, library, monkeypatch, where):
    """Nobody waits out the limit, which would be the text, and no communicator is left."""
    monkeypatch.setattr(nccl, "OPEN_SECONDS", 60.0)
    library.fail_at(lambda name: comm.rank == comm.size - 1 and name == where)
    with pytest.raises(CommError, match=rf"{where}.*: NCCL says .*asked to fail"):
        nccl.open_path(comm, place, node=str(comm.rank), has_messages=True)
    assert not nccl_comm._everyone()


@pytest.mark.ranks(2, 3)
def test_lost_peers_are_seen(comm, place, library, monkeypatch):
    """A peer that aborts makes an operation end that would wait for it, and the thread that looks say why."""
    made = comm.split(0, comm.ranks, ("lost",), comm_trace=CommTrace())
    path = nccl.open_path(made, place, node=str(comm.rank))
    told, heard = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: (told.append(args.exc_value), heard.set()))
    x = torch.zeros(3, device=place)
    path.broadcast(x, 0)
    comm.barrier()  # else one aborts before the others have what it has
    if comm.rank == comm.size - 1:
        nccl_comm.abort_all()
    else:
        assert heard.wait(60)
        assert "remote process exited" in str(told[0])
    with pytest.raises(CommError, match="cannot be used any more"):
        path.broadcast(x, 0)
    comm.barrier()
    path.close()
    made.close()
    assert not nccl_comm._everyone()


def test_every_stream_has_its_order(joined, place):
    """What was queued on a stream comes before the operation there."""
    stream = torch.get_device_module(place).Stream(device=place)
    with devices.on_stream(place, stream):
        x = torch.arange(5.0).pin_memory().to(place, non_blocking=True)
        out = torch.zeros(5 * joined.size, device=place)
        joined.all_gather(out, x)
        assert out.cpu().tolist() == [*range(5)] * joined.size


def test_version_and_words(library):
    from mpispeed.mesh.backends.nccl_library import library_for

    found = library_for(stand_in())
    assert str(found) == "NCCL 2.27.3"
    with pytest.raises(CommError, match="f over g: NCCL says remote process exited"):
        found.check("f", 6, "g")
    assert mpispeed.init_distributed().size >= 1
