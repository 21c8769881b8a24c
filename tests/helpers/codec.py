"""Checks of quantized verbs on any ranks, against plain loops over blocks in numpy. World rank = outer * I + inner."""

import numpy as np
import torch

from mpispeed.mesh import Mesh, Topology
from mpispeed.mesh.compressed.quantized import (
    Feedback,
    quantized_all_gather,
    quantized_gather_through,
    quantized_reduce_scatter,
)
from mpispeed.native.codes import Grid

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 255, 1024, 2501)
BLOCK = 512


def cuts(size):
    """All (inner, outer) sizes for so many ranks."""
    return [(inner, size // inner) for inner in range(1, size + 1) if size % inner == 0]


def gather_bytes(count, sizes, block):
    """Bytes that each rank sends in a quantized gather of shards of `count` elements, by group in order.

    Units: bytes by the ring formula, (N - 1) times the bytes of a rank before the gather over N ranks.
    """
    have, sent = Grid(count, block).nbytes(8), []
    for size in sizes:
        sent.append((size - 1) * have)
        have *= size
    return tuple(sent)


def reduce_scatter_bytes(count, inner, outer, block):
    """Bytes that each rank sends in the two hops of a quantized reduce-scatter with shards of `count` elements.

    Units: bytes; a rank keeps its own part of every hop.
    """
    part = Grid(count, block).nbytes(4)
    return (inner - 1) * outer * part, (outer - 1) * part


def gradient(rank, count, dtype=torch.float32, seed=0):
    """What a rank brings."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(count, generator=source).to(dtype)


def coded(x, levels, block=BLOCK):
    """Values after a trip through codes, and the half levels that bound the error; both as float32 arrays."""
    back, bound = np.empty_like(x), np.empty_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = np.abs(part).max() / np.float32(levels)
        back[start : start + block] = np.rint(part / scale) * scale if scale else 0.0
        bound[start : start + block] = scale / 2 + np.abs(part).max() * np.float32(2.0**-23)
    return back, bound


def reduced(full, inner, outer, count, mine, scale):
    """This rank's part of the two-hop sum of `full` (one array per world rank), and a bound of its error."""
    i, o = mine % inner, mine // inner
    start = (i * outer + o) * count
    total, slack = np.zeros(count, np.float32), np.zeros(count)
    for far in range(outer):
        addends = [full[far * inner + near][start : start + count] for near in range(inner)]
        if inner > 1:
            trips = [coded(x, 7) for x in addends]
            addends = [back for back, _ in trips]
            slack += sum(bound.astype(np.float64) for _, bound in trips)
        value = addends[0]
        for x in addends[1:]:
            value = value + x
        if outer > 1:
            value, bound = coded(value, 7)
            slack += bound
        total = value if far == 0 else total + value
    # Sums of up to 6 addends and the product are rounded in fp32 too.
    rounding = 8 * 2.0**-24 * sum(np.abs(x[start : start + count].astype(np.float64)) for x in full)
    return total * np.float32(scale), (slack + rounding) * scale + 2.0**-24 * np.abs(total) * scale


def sent(mesh, axis, verb):
    """(calls, bytes) in the trace."""
    entry = mesh[axis].comm_trace.entries().get((verb, (axis,)))
    return (entry.count, entry.bytes) if entry else (0, 0)


def meshes(world):
    """A mesh for every cut of the world."""
    for inner, outer in cuts(world.size):
        mesh = Mesh(Topology({"outer": outer, "inner": inner}), world)
        yield mesh, inner, outer
        mesh.close()


def check_gathers(world, dtype):
    """All ranks end with the coded values of all shards; nothing is lost where one rank is alone."""
    size = world.size
    for count in COUNTS:
        shards = [gradient(rank, count, dtype) for rank in range(size)]
        wanted = torch.cat([torch.from_numpy(coded(x.float().numpy(), 127)[0]).to(dtype) for x in shards])
        wanted = wanted if size > 1 else shards[0]
        out = torch.full((size * count,), 7.0, dtype=dtype)
        quantized_all_gather(world.comm, out, shards[world.rank], block=BLOCK)
        assert torch.equal(out, wanted)
        out.view(size, count)[world.rank] = shards[world.rank]
        quantized_all_gather(world.comm, out, out.view(size, count)[world.rank], block=BLOCK)
        assert torch.equal(out, wanted)


def check_gathers_through(world, dtype):
    """Gathering over two groups gives the same bits as over one, in nested order, and sends what theory says."""
    for mesh, inner, outer in meshes(world):
        i, o = mesh.index("inner"), mesh.index("outer")
        comms = [mesh["outer"], mesh["inner"]]
        for count in COUNTS:
            full = torch.cat([gradient(rank, count, dtype) for rank in range(world.size)])
            wanted = torch.cat(
                [torch.from_numpy(coded(x.float().numpy(), 127)[0]).to(dtype) for x in full.split(count)]
            )
            out = torch.zeros_like(full)
            own = full[(i * outer + o) * count :][:count]
            before = [sent(mesh, axis, "all_gather") for axis in ("outer", "inner")]
            quantized_gather_through(comms, out, own, block=BLOCK)
            after = [sent(mesh, axis, "all_gather") for axis in ("outer", "inner")]
            assert torch.equal(out, wanted if world.size > 1 else full)
            theory = gather_bytes(count, [outer, inner], BLOCK)
            calls = [2 * (outer > 1), 2 * (inner > 1)]
            assert [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)] == list(
                zip(calls, theory, strict=True)
            )
            scales = -(-count // BLOCK)
            assert sum(theory) == (world.size - 1) * (count + 4 * scales)


def check_reductions(world, dtype):
    """The bits of the plain loops, within the bound of the exact sum, and no byte more than theory says."""
    for mesh, inner, outer in meshes(world):
        for count in COUNTS:
            full = [gradient(rank, world.size * count, dtype) for rank in range(world.size)]
            for scale in (1.0, 1 / 3):
                arrays = [x.float().numpy() for x in full]
                wanted, bound = reduced(arrays, inner, outer, count, world.rank, scale)
                shard = torch.full((count,), 7.0)
                before = [sent(mesh, axis, "all_to_all") for axis in ("inner", "outer")]
                mine = full[world.rank].clone()
                quantized_reduce_scatter(mesh["inner"], mesh["outer"], shard, mine, block=BLOCK, scale=scale)
                after = [sent(mesh, axis, "all_to_all") for axis in ("inner", "outer")]
                assert torch.equal(mine, full[world.rank])
                assert torch.equal(shard, torch.from_numpy(wanted))
                start = (mesh.index("inner") * outer + mesh.index("outer")) * count
                exact = sum(x.double() for x in full)[start : start + count] * scale
                assert ((shard.double() - exact).abs() <= torch.from_numpy(np.asarray(bound))).all()
                theory = reduce_scatter_bytes(count, inner, outer, BLOCK)
                calls = (2 * (inner > 1), 2 * (outer > 1))
                moved = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
                assert moved == list(zip(calls, theory, strict=True))
            own = mine[start : start + count]
            quantized_reduce_scatter(mesh["inner"], mesh["outer"], own, mine, block=BLOCK, scale=scale)
            assert torch.equal(own, torch.from_numpy(wanted).to(dtype))


def check_feedback(world):
    """With feedback the mean of many reductions of the same values comes close to the exact sum."""
    count, rounds = 700, 120
    for mesh, inner, outer in meshes(world):
        full = [gradient(rank, world.size * count) for rank in range(world.size)]
        start = (mesh.index("inner") * outer + mesh.index("outer")) * count
        exact = sum(x.double() for x in full)[start : start + count]
        errors = []
        for feedback in (None, Feedback()):
            total, shard = torch.zeros(count, dtype=torch.float64), torch.empty(count)
            for _ in range(rounds):
                quantized_reduce_scatter(
                    mesh["inner"], mesh["outer"], shard, full[world.rank], block=BLOCK, feedback=feedback
                )
                total += shard
            errors.append((total / rounds - exact).square().mean().sqrt().item())
        plain, kept = errors
        if world.size == 1:
            assert plain == kept == 0.0
            assert feedback.nbytes == feedback.uses == 0
            continue
        assert plain > 0.05
        assert kept < plain / 15, (inner, outer, plain, kept)
        hops = [n for n, is_used in ((world.size, True), (outer, min(inner, outer) > 1)) if is_used]
        assert feedback.nbytes == sum(n * (count + 4 * -(-count // BLOCK)) for n in hops)


def check_feedback_handling(world):
    """Overflows pass through and leave no trace, clearing starts anew, rescaling scales, resets come in time."""
    count, comm, size = 600, world.comm, world.size
    alone = Mesh(Topology({"outer": 1, "inner": size}), world)["outer"]
    full = gradient(world.rank, size * count)

    def reduce(feedback, x=full):
        shard = torch.empty(count)
        quantized_reduce_scatter(comm, alone, shard, x, block=BLOCK, feedback=feedback)
        return shard

    first = reduce(None)
    feedback = Feedback(beta=0.5, reset_after=3)
    runs = [reduce(feedback) for _ in range(6)]
    assert torch.equal(runs[0], first)
    assert all(torch.equal(a, b) for a, b in zip(runs[:3], runs[3:], strict=True))
    assert feedback.uses == 0
    if size > 1:
        assert not torch.equal(runs[0], runs[1])
    reduce(feedback)
    feedback.clear()
    assert torch.equal(reduce(feedback), first)
    doubled = Feedback(beta=0.5)
    reduce(doubled)
    doubled.rescale(2.0)
    assert torch.equal(reduce(doubled, full * 2), runs[1] * 2)
    bad = full.clone()
    if world.rank == size - 1:
        bad[0] = float("nan")
    assert reduce(doubled, bad)[:BLOCK].isnan().any().item() == (comm.rank == 0)
    assert reduce(doubled).isfinite().all()
