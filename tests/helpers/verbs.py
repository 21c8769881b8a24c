"""What every transport has to do: the same checks run on simulated ranks and on MPI."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from mpispeed.base.errors import AgreementError, CommError
from mpispeed.mesh import Comm
from mpispeed.mesh.collectives.work import nap_until

HALVES = (torch.bfloat16, torch.float16)
REALS = (torch.float32, torch.float64, *HALVES)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
REDUCIBLE = (*REALS, *COMPLEX, *INTEGERS, torch.bool)
BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
MOVABLE = (*REDUCIBLE, torch.float8_e4m3fn)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ by rank and position, exact in every dtype."""
    base = (torch.arange(count, dtype=torch.int64) * 7 + rank * 3) % 4 + 1
    if dtype == torch.bool:
        return base > 2
    return (base * (1 - 1j)).to(dtype) if dtype.is_complex else base.to(torch.float32).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, for every dtype; only the zeros of complex products may differ in sign."""
    if a.dtype.is_complex:
        return a.dtype == b.dtype and torch.equal(a, b)
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def wide(x: torch.Tensor) -> torch.Tensor:
    """In a dtype where the expected results are computed."""
    return x.to(torch.complex128 if x.dtype.is_complex else torch.float64)


def expected(op: str, parts: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """The reduction of `parts`, computed element by element in a wide dtype."""
    if op in BITS:
        bits = [part.to(torch.int64) for part in parts]
        return functools.reduce(BITS[op], bits).to(parts[0].dtype)
    stack = torch.stack([wide(part) for part in parts])
    total = {
        "sum": lambda: stack.sum(0) * scale,
        "avg": lambda: stack.sum(0) / len(parts) * scale,
        "prod": lambda: stack.prod(0),
        "min": lambda: stack.min(0).values,
        "max": lambda: stack.max(0).values,
    }[op]()
    if parts[0].dtype == torch.bool:
        total = total > 0
    return total.to(parts[0].dtype) if parts[0].dtype not in INTEGERS else total.to(torch.int64).to(parts[0].dtype)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Operations that mean something for a dtype."""
    if dtype.is_complex:
        return ("sum", "prod")
    if dtype in INTEGERS or dtype == torch.bool:
        return ("sum", "prod", "min", "max", *BITS)
    return ("sum", "prod", "min", "max")


def check_reductions(comm: Comm, dtype: torch.dtype, count: int = 23) -> None:
    """all_reduce, reduce and reduce_scatter of whole numbers, which every order gives exactly."""
    size, rank = comm.size, comm.rank
    for op in ops_of(dtype):
        parts = [values(r, count, dtype) for r in range(size)]
        x = parts[rank].clone()
        comm.all_reduce(x, op)
        assert same(x, expected(op, parts)), (op, x)
        root = size - 1
        y = parts[rank].clone()
        comm.reduce(y, root, op)
        assert same(y, expected(op, parts) if rank == root else parts[rank]), (op, y)
        fulls = [values(r, count * size, dtype) for r in range(size)]
        shard = torch.zeros(count, dtype=dtype)
        kept = fulls[rank].clone()
        comm.reduce_scatter(shard, kept, op)
        wanted = expected(op, fulls).view(size, count)[rank]
        assert same(shard, wanted), (op, shard)
        assert same(kept, fulls[rank])
        own = kept.view(size, count)[rank]
        comm.reduce_scatter(own, kept, op)
        assert same(own, wanted), (op, own)


def check_scales(comm: Comm, dtype: torch.dtype) -> None:
    """Averages and scaled sums; powers of two, so that the only rounding is that of the average."""
    parts = [values(r, 17, dtype) for r in range(comm.size)]
    x = parts[comm.rank].clone()
    comm.all_reduce(x, scale=0.5)
    assert same(x, expected("sum", parts, 0.5))
    y = parts[comm.rank].clone()
    comm.all_reduce(y, "avg")
    # One rounding of 1/size and one of the product: within two units of the last place.
    torch.testing.assert_close(y, expected("avg", parts), rtol=2 * torch.finfo(dtype).eps, atol=0)
    full = torch.cat([part for part in parts] * 1)[: 17 // comm.size * comm.size].contiguous()
    shard = torch.zeros(full.numel() // comm.size, dtype=dtype)
    comm.reduce_scatter(shard, full, scale=0.25)
    wanted = (wide(full) * comm.size * 0.25).to(dtype).view(comm.size, -1)[comm.rank]
    assert same(shard, wanted)


def check_moves(comm: Comm, dtype: torch.dtype, count: int = 11) -> None:
    """Verbs that only move: any dtype, any shape, in place or not."""
    size, rank = comm.size, comm.rank
    shards = [values(r, count, dtype) for r in range(size)]
    out = torch.zeros(size, count, dtype=dtype)
    comm.all_gather(out, shards[rank].view(1, count))
    assert same(out.view(-1), torch.cat(shards))
    place = torch.zeros(size * count, dtype=dtype)
    place.view(size, count)[rank] = shards[rank]
    comm.all_gather(place, place.view(size, count)[rank])
    assert same(place, torch.cat(shards))
    for root in range(size):
        x = shards[rank].clone()
        comm.broadcast(x, root)
        assert same(x, shards[root])
    for root in range(size):
        gathered = torch.zeros(size * count if rank == root else 0, dtype=dtype)
        comm.gather(gathered, shards[rank], root)
        assert rank != root or same(gathered, torch.cat(shards))
        given = torch.zeros(count, dtype=dtype)
        comm.scatter(given, torch.cat(shards) if rank == root else torch.empty(0, dtype=dtype), root)
        assert same(given, shards[rank])
        own = place.view(size, count)[rank].zero_()
        if rank == root:
            place.copy_(torch.cat(shards))
        comm.scatter(own, place, root)
        assert same(own, shards[rank])
    x = torch.cat([values(rank * size + j, count, dtype) for j in range(size)])
    got = torch.zeros_like(x)
    comm.all_to_all(got, x)
    assert same(got, torch.cat([values(j * size + rank, count, dtype) for j in range(size)]))
    check_uneven(comm, dtype)
    check_ring(comm, dtype)


def check_uneven(comm: Comm, dtype: torch.dtype) -> None:
    """Rank i sends (i + 2 j) % 5 elements to rank j, some of them none."""
    size, rank = comm.size, comm.rank
    count = [[(i + 2 * j) % 5 for j in range(size)] for i in range(size)]
    x = torch.cat([values(rank * size + j, count[rank][j], dtype) for j in range(size)])
    out_counts = [count[i][rank] for i in range(size)]
    got = torch.zeros(sum(out_counts), dtype=dtype)
    comm.all_to_all(got, x, out_counts, count[rank])
    assert same(got, torch.cat([values(i * size + rank, out_counts[i], dtype) for i in range(size)]))


def check_ring(comm: Comm, dtype: torch.dtype) -> None:
    """Messages to the next rank: blocking with alternating order, then posted on all ranks at once."""
    size, rank = comm.size, comm.rank
    if size == 1:
        return
    x, got = values(rank, 9, dtype), torch.zeros(9, dtype=dtype)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        comm.send(x, after, tag=5)
        comm.recv(got, before, tag=5)
    else:
        comm.recv(got, before, tag=5)
        comm.send(x, after, tag=5)
    assert same(got, values(before, 9, dtype))
    got.zero_()
    # All ranks receive first: started messages are posted and do not stand in each other's way.
    works = [comm.start_recv(got, before, tag=6), comm.start_send(x, after, tag=6)]
    for work in works:
        work.wait()
    assert same(got, values(before, 9, dtype))


def check_any_source(comm: Comm) -> None:
    """Messages of all others, received in whatever order they come."""
    size, rank = comm.size, comm.rank
    if rank:
        comm.send(torch.tensor([rank, 10 * rank]), 0, tag=3)
        return
    found = {}
    for _ in range(size - 1):
        x = torch.zeros(2, dtype=torch.int64)
        poll = comm.transport.post_recv_any(x, 3)
        source: list[int | None] = []
        nap_until(lambda poll=poll, source=source: source.append(poll()) or source[-1] is not None)
        found[source[-1]] = x.tolist()
    assert found == {other: [other, 10 * other] for other in range(1, size)}


def check_members(comm: Comm) -> None:
    """Groups made by their members only, in the order given."""
    size, rank = comm.size, comm.rank
    members = [r for r in reversed(range(size)) if r != 1] if size > 2 else [*reversed(range(size))]
    if rank not in members:
        return
    for name in ("first", "second"):
        group = comm.of_members(members, name, ("members",))
        assert (list(group.ranks), group.rank, group.size) == (members, members.index(rank), len(members))
        out = torch.zeros(len(members), dtype=torch.int64)
        group.all_gather(out, torch.tensor([rank]))
        assert out.tolist() == members
        group.close()


def check_half_accumulation(comm: Comm, dtype: torch.dtype) -> None:
    """16-bit floats are added in fp32 and rounded once."""
    ones = torch.ones(5, dtype=dtype)
    comm.all_reduce(ones)
    assert ones.tolist() == [float(comm.size)] * 5
    # A value of which adding 1 is lost in 16 bits, so only a wide sum with one rounding comes out right.
    big = 256.0 if dtype == torch.bfloat16 else 2048.0
    x = torch.full((3 * comm.size,), big if comm.rank == 0 else 1.0, dtype=dtype)
    wanted = torch.tensor(big + comm.size - 1).to(dtype)
    shard = torch.zeros(3, dtype=dtype)
    comm.reduce_scatter(shard, x)
    assert torch.equal(shard, wanted.expand(3))
    unrounded = torch.zeros(3, dtype=torch.float32)
    comm.reduce_scatter(unrounded, x)
    assert unrounded.tolist() == [big + comm.size - 1] * 3


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The fixed tree over ranks, written out."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    return (x * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)).to(dtype)


def check_ordered_bits(comm: Comm, dtype: torch.dtype, counts: tuple[int, ...] = (1, 7, 64, 40009)) -> None:
    """all_reduce and reduce_scatter equal the tree bit by bit, wherever an element stands."""
    size, rank = comm.size, comm.rank
    accumulate = torch.float32 if dtype in HALVES else dtype
    for count in counts:
        parts = [noise(r, count, dtype) for r in range(size)]
        wanted = tree([part.to(accumulate) for part in parts]).to(dtype)
        x = parts[rank].clone()
        comm.all_reduce(x)
        assert same(x, wanted), count
        # Half of it, shifted: another cut and another place give the same bits.
        half = parts[rank][count // 2 :].clone()
        comm.all_reduce(half)
        assert same(half, wanted[count // 2 :]), count
        cut = math.ceil(count / size)
        full = torch.zeros(cut * size, dtype=dtype)
        full[:count] = parts[rank]
        shard = torch.zeros(cut, dtype=dtype)
        comm.reduce_scatter(shard, full)
        end = min(count, (rank + 1) * cut)
        assert same(shard[: max(0, end - rank * cut)], wanted[rank * cut : end]), count


def check_chunks(comm: Comm, dtype: torch.dtype) -> None:
    """Small message and window limits force many messages and change no bit."""
    small = comm.duplicate()
    limits = small.group.limits
    limits.chunk_bytes, limits.window_bytes = 40 * comm.size, 24 * comm.size
    check_moves(small, dtype, count=53)
    if dtype in REDUCIBLE:
        check_reductions(small, dtype, count=37)
    if dtype in REALS:
        check_ordered_bits(small, dtype, (1, 7, 1009))


def check_refusals(comm: Comm) -> None:
    """Every rank raises before anything is sent."""
    size = comm.size
    x = torch.zeros(4 * size, 2)
    with pytest.raises(CommError, match="contiguous"):
        comm.all_reduce(x.t())
    with pytest.raises(CommError, match="in memory"):
        comm.all_reduce(x.to("meta"))
    with pytest.raises(CommError, match="needs"):
        comm.all_gather(x, torch.zeros(9))
    with pytest.raises(CommError, match="must be equal"):
        comm.all_gather(x, torch.zeros(8, dtype=torch.float64))
    with pytest.raises(CommError, match="must be equal"):
        comm.reduce_scatter(torch.zeros(8, dtype=torch.float16), x)
    with pytest.raises(CommError, match="unknown operation 'median'"):
        comm.all_reduce(x, "median")
    with pytest.raises(CommError, match=r"average of torch.int32"):
        comm.all_reduce(x.to(torch.int32), "avg")
    with pytest.raises(CommError, match="no order"):
        comm.all_reduce(x.to(torch.complex64), "max")
    with pytest.raises(CommError, match="moved but not reduced"):
        comm.all_reduce(x.to(torch.float8_e4m3fn))
    with pytest.raises(CommError, match=r"scale=0\.5"):
        comm.all_reduce(x.to(torch.int64), scale=0.5)
    with pytest.raises(CommError, match="names rank"):
        comm.broadcast(x, size)
    with pytest.raises(CommError, match="does not send to itself"):
        comm.send(x, comm.rank)
    with pytest.raises(CommError, match="overlap"):
        comm.all_to_all(x, x)
    with pytest.raises(CommError, match="add up"):
        comm.all_to_all(torch.zeros(3), x, [3] * size, [1] * size)
    with pytest.raises(CommError, match="both counts"):
        comm.all_to_all(torch.zeros_like(x), x, None, [8] * size)
    if size > 1:
        with pytest.raises(CommError, match="not the slice of rank"):
            comm.all_gather(x, x.view(size, 8)[(comm.rank + 1) % size])
    with pytest.raises(CommError, match="contiguous"):
        comm.start_all_reduce(x.t())
    comm.barrier()


def check_agreement(comm: Comm) -> None:
    """All raise the same error, naming who failed and the first message; or none raises."""
    comm.agree(True, "unused")
    failing = comm.rank == comm.size - 1
    with pytest.raises(AgreementError, match="disk full") as caught:
        comm.agree(not failing, "disk full" if failing else "")
    if comm.size > 1:
        assert str(caught.value).startswith(f"rank {comm.ranks[-1]} of {comm.size}")
    with pytest.raises(CommError):
        comm.agree(False, "all of us", CommError)
    assert comm.share({"a": comm.rank}, comm.size - 1) == {"a": comm.size - 1}
    assert comm.gather_objects((comm.rank, "x")) == [(r, "x") for r in range(comm.size)]


def check_journal(comm: Comm) -> None:
    """Bytes follow the ring formulas exactly."""
    size, rank, elements = comm.size, comm.rank, 12 * comm.size
    comm_trace = comm.comm_trace
    comm_trace.reset()
    x, part, total = torch.zeros(elements), torch.zeros(12), 4 * elements
    comm.all_reduce(x)
    comm.all_gather(x, part)
    comm.all_gather(x, part)
    comm.reduce_scatter(part, x.clone())
    comm.broadcast(x, size - 1)
    comm.all_to_all(torch.zeros_like(x), x)
    half = torch.zeros(elements, dtype=torch.bfloat16)
    comm.start_reduce_scatter(part, half).wait()
    counts = {verb: (e.count, e.bytes) for (verb, axes), e in comm_trace.entries().items() if axes == comm.axes}
    share = total * (size - 1) // size
    assert counts == {
        "all_reduce": (1, 2 * share),
        "all_gather": (2, 2 * share),
        "reduce_scatter": (2, share + share // 2),
        "broadcast": (1, total if rank == size - 1 and size > 1 else 0),
        "all_to_all": (1, share),
    }
    assert comm_trace.total_bytes("all_gather") == 2 * share
    assert comm_trace.total_bytes() == sum(sent for _, sent in counts.values())
    assert "all_gather" in comm_trace.summary()
    comm_trace.reset()
    assert comm_trace.entries() == {}


def check_started(comm: Comm) -> None:
    """Started verbs give the results of the blocking ones, in start order, beside blocking verbs."""
    size, rank = comm.size, comm.rank
    x = torch.full((1000,), float(rank + 1))
    out, shard = torch.zeros(size), torch.tensor([float(rank)])
    swapped, seen = torch.zeros(size), []
    works = [
        comm.start_all_reduce(x),
        comm.start_all_gather(out, shard),
        comm.start_all_to_all(swapped, torch.arange(float(size)) + 10 * rank),
        comm.start(lambda inner: seen.append(inner.gather_objects(rank))),
        comm.start(lambda _: seen.append("second")),
    ]
    y = torch.ones(10)
    comm.all_reduce(y)
    assert y.tolist() == [float(size)] * 10
    for work in works:
        work.wait(60)
        assert work.is_done()
    assert x.tolist() == [size * (size + 1) / 2] * 1000
    assert out.tolist() == [float(r) for r in range(size)]
    assert swapped.tolist() == [float(rank + 10 * r) for r in range(size)]
    assert seen == [list(range(size)), "second"]
    token = torch.tensor([rank])
    comm.start_broadcast(token, size - 1).wait(60)
    assert token.item() == size - 1

    def fail(_: Comm) -> None:
        msg = "broken on purpose"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="on purpose"):
        comm.start(fail).wait(60)
