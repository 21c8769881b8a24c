"""Checks of the one-bit mean on any ranks, against the fp64 reference. World rank = outer * I + inner."""

import hashlib

import numpy as np
import pytest
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.collectives import host_collectives
from mpispeed.mesh.compressed import onebit, onebit_nodes
from mpispeed.mesh.compressed.onebit import OneBitErrors, compressed_all_reduce, padded_length, sent_bytes
from mpispeed.mesh.compressed.onebit_nodes import compressed_all_reduce_through, shard_length, zero_errors
from tests.helpers.codec import meshes, sent
from tests.helpers.onebit_reference import OneBitMean

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CASES = 250
"""Random sizes and seeds on every number of ranks: 1,000 on 1, 2, 3 and 4."""

LEAST = 1e-44  # a few subnormal floats
VERB = "compressed_all_reduce"
GOLDEN = (
    [1, -2, 3, -4, 0.5, -0.5, 0, 2, -1, 1, -1, 1, 4, -4, 0.25, -0.25],
    [-1, -2, 1, 4, 0.5, 1.5, -3, 0, 2, -1, 0.5, 1, -4, -4, 1, 0],
)
GOLDEN_CALLS = (  # what the two ranks send, in two calls with the same values
    {"scales": (2.100967, 2.132340), "bytes": ([171, 90], [61, 179]),
     "means": (1.496741, 1.296240), "mean bytes": ([61], [179])},
    {"scales": (2.945615, 2.933875), "bytes": ([37, 169], [148, 192]),
     "means": (1.853330, 2.012591), "mean bytes": ([165], [200])},
)  # fmt: skip


def values(rank, count, dtype=torch.float32, seed=0):
    """What a rank brings: every seed has its own size and offset."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=source) * 2.0 ** (seed % 9 - 4) + seed % 3 * 0.1).to(dtype)


def digest(*tensors):
    return hashlib.sha256(b"".join(x.view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()


def wide(tensors):
    return [x.double().numpy() for x in tensors]


def gathered(comm, *tensors):
    """Each of the fp32 tensors of all ranks, in one message."""
    own = torch.cat(tensors)
    out = torch.empty(comm.size * own.numel())
    comm.all_gather(out, own)
    return out.view(comm.size, -1).split([x.numel() for x in tensors], dim=1)


class Beside:
    """One call of the reference from the errors that all ranks of a group have, and how far fp32 may be from it.

    `blurs` bound what the inputs of our side may differ by. A sign is in doubt where the value of a worker is below
    that, or where the value of the server is below its bound: n + 1 additions, rounded by 2^-24, of numbers of at most
    sum(scales) / n + |e|, whose scales are rounded themselves and follow the blurs.
    """

    def __init__(self, inputs, worker_errors, server_errors, blurs=None):
        workers, unit = len(inputs), 2.0**-24
        mean = OneBitMean(workers, len(inputs[0]))
        mean.worker_errors, mean.server_errors = wide(worker_errors), wide(server_errors)
        pad = np.zeros(mean.padded - mean.length)
        before = np.concatenate(mean.server_errors)
        compensated = [np.concatenate([x, pad]) + e for x, e in zip(inputs, mean.worker_errors, strict=True)]
        self.sizes = [np.abs(y).max(initial=0.0) for y in compensated]
        blurs = [np.concatenate([b, pad]) for b in blurs or np.zeros((workers, mean.length))]
        self.unsure = [np.abs(y) < b for y, b in zip(compensated, blurs, strict=True)]
        self.out = mean(inputs)
        self.scales = mean.sent["worker scales"]
        signs = [2.0 * np.unpackbits(np.array(b, np.uint8)) - 1.0 for b in mean.sent["server bytes"]]
        coded = np.concatenate([t * s for t, s in zip(mean.sent["server scales"], signs, strict=True)])
        weight = sum(self.scales) / workers
        self.bound = (workers + 4) * unit * (weight + np.abs(before)) + np.max(blurs, initial=0.0) + LEAST
        near_zero = np.abs(np.concatenate(mean.server_errors) + coded) <= self.bound
        self.doubt = np.logical_or.reduce([*self.unsure, near_zero & (self.bound > LEAST)])  # zeros alone are exact
        self.blur = np.max(blurs, initial=0.0)
        self.worker_errors, self.server_errors = mean.worker_errors, mean.server_errors

    def check(self, rank, out, errors, dtype):
        """Compare what a rank has after the call; the number of elements that were left out. `out` may be shorter."""
        known, unit = ~self.doubt, 2.0**-24
        kept, far = known[: len(out)], self.bound.max(initial=0.0)
        ours, wanted = out.double().numpy(), self.out[: len(out)]
        assert np.array_equal(ours[kept] >= 0, wanted[kept] >= 0)
        least = 2.0**-25 if dtype == torch.float16 else 0.0
        assert (np.abs(ours - wanted)[kept] <= 2 * far + ROUNDINGS[dtype] * np.abs(wanted[kept]) + least).all()
        worker = np.abs(errors.worker.double().numpy() - self.worker_errors[rank])
        assert (
            worker[~self.unsure[rank]] <= 8 * unit * (self.sizes[rank] + self.scales[rank]) + 2 * self.blur + LEAST
        ).all()
        chunk = slice(rank * errors.server.numel(), (rank + 1) * errors.server.numel())
        server = np.abs(errors.server.double().numpy() - self.server_errors[rank])
        assert (server[known[chunk]] <= 4 * far).all()
        return int(self.doubt.sum())


def run_beside(comm, x, errors, inputs):
    """A mean, and the same by the reference from the same errors; the number of elements that were left out."""
    beside = Beside(wide(inputs), *gathered(comm, errors.worker, errors.server))
    compressed_all_reduce(comm, x, errors)
    return beside.check(comm.rank, x, errors, x.dtype)


def check_random_cases(world, cases=CASES):
    """Results, errors of both sides and bits on all ranks, from the errors of up to two calls before."""
    comm, skipped, total, digests = world.comm, 0, 0, []
    choose = np.random.default_rng(comm.size)
    for seed in range(cases):
        count, dtype = int(choose.integers(1, 700)), DTYPES[seed % 5 % 3]
        errors = OneBitErrors.zeros(count, comm.size)
        for turn in range(1 + seed % 3):
            inputs = [values(rank, count, dtype, 7 * seed + turn) for rank in range(comm.size)]
            x = inputs[comm.rank].clone()
            skipped += run_beside(comm, x, errors, inputs)
            total += count
            digests.append(digest(x))
    assert len(set(comm.gather_objects(tuple(digests)))) == 1
    assert skipped <= 1e-4 * total, (skipped, total)


def record_messages(monkeypatch, comm):
    """A list of the rows of this rank: what it sends to every rank, then what it sends to all."""
    rows, all_to_all, all_gather = [], host_collectives.swap_chunks, host_collectives.gather_chunks

    def spy(verb, source):
        def call(over, out, x):
            if over is comm.group:
                rows.append(source(x).clone())
            verb(over, out, x)

        return call

    monkeypatch.setattr(host_collectives, "swap_chunks", spy(all_to_all, lambda x: x.view(comm.size, -1)))
    monkeypatch.setattr(host_collectives, "gather_chunks", spy(all_gather, lambda x: x.view(1, -1)))
    return rows


def check_golden(world, monkeypatch):
    """Bits and scales of the specification, on two ranks."""
    comm, reference = world.comm, OneBitMean(2, 16)
    errors = OneBitErrors.zeros(16, 2)
    rows = record_messages(monkeypatch, comm)
    for wanted in GOLDEN_CALLS:
        exact = reference([np.array(x, float) for x in GOLDEN])
        x = torch.tensor(GOLDEN[comm.rank])
        compressed_all_reduce(comm, x, errors)
        to_ranks, to_all = rows[-2:]
        # a mean has the rounding of the scales it was made of: one unit in the last place of theirs
        unit = np.spacing(np.float32(max(reference.sent["worker scales"])))
        for row, key, scale in ((to_ranks, "bytes", "scales"), (to_all, "mean bytes", "means")):
            assert row[:, 4:].flatten().tolist() == wanted[key][comm.rank]
            precise = reference.sent["worker scales" if scale == "scales" else "server scales"][comm.rank]
            found = row[:, :4].numpy().copy().view(np.float32).astype(np.float64)
            assert (np.abs(found - precise) <= unit).all()
            assert precise == pytest.approx(wanted[scale][comm.rank], abs=5e-7)
        signs = 2.0 * np.unpackbits(np.array(wanted["mean bytes"], np.uint8)) - 1.0
        means = np.repeat(wanted["means"], 8)
        assert np.abs(x.numpy() - signs * means).max() <= 1e-6
        assert np.abs(x.numpy() - exact).max() <= 2 * np.spacing(np.float32(2.0))
    assert len(rows) == 2 * len(GOLDEN_CALLS)


def check_pieces(world, monkeypatch, piece, dtype):
    """Coding beside the wire changes no bit of results and errors, and no byte."""
    monkeypatch.setattr(onebit, "PIECE_ELEMENTS", piece)
    comm = world.comm
    for chunk in (piece + 8, 2 * piece, 4 * piece + 264):
        count = comm.size * chunk - 5
        results = []
        for overlapped in (False, True):
            errors, outs, before = (
                OneBitErrors.zeros(count, comm.size),
                [],
                comm.comm_trace.entries().get((VERB, comm.axes)),
            )
            for turn in range(3):
                outs.append(values(comm.rank, count, dtype, turn))
                compressed_all_reduce(comm, outs[-1], errors, overlapped=overlapped)
            after = comm.comm_trace.entries()[VERB, comm.axes]
            assert after.bytes - (before.bytes if before else 0) == 3 * sent_bytes(count, comm.size)
            results.append((*outs, errors.worker, errors.server))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert len(set(comm.gather_objects(digest(*results[1][:3])))) == 1


def check_axes(world):
    """Groups over one axis of a mesh: results of the group's own reference, and bytes of the formula."""
    for mesh, inner, outer in meshes(world):
        for axis, size in (("inner", inner), ("outer", outer)):
            comm, count = mesh[axis], 301
            errors = OneBitErrors.zeros(count, size)
            for turn in range(2):
                inputs = [values(rank, count, seed=turn) for rank in comm.ranks]
                x, before = inputs[comm.rank].clone(), sent(mesh, axis, VERB)
                skipped = run_beside(comm, x, errors, inputs)
                after = sent(mesh, axis, VERB)
                assert skipped == 0
                length = -(-count // (8 * size)) * 8 * size
                assert after == (before[0] + 1, before[1] + 2 * (size - 1) * (length // (8 * size) + 4))


def check_feedback(world):
    """The sum of many means and of what is left is that of the true ones; so their mean comes close to the true one."""
    comm, count, rounds = world.comm, 500, 200
    errors = OneBitErrors.zeros(count, comm.size)
    exact = sum(values(rank, count).double() for rank in range(comm.size)) / comm.size
    total, first = torch.zeros(count, dtype=torch.float64), None
    for _ in range(rounds):
        x = values(comm.rank, count)
        compressed_all_reduce(comm, x, errors)
        first = x.clone() if first is None else first
        total += x
    worker, server = gathered(comm, errors.worker, errors.server)
    left = worker.double().mean(0) + server.flatten().double()
    # every call rounds a few numbers of the size of the values
    assert (total + left[:count] - rounds * exact).abs().max() <= rounds * 2.0**-22 * exact.abs().max() + 1e-5
    plain, kept = ((y - exact).square().mean().sqrt() for y in (first, total / rounds))
    assert kept < plain / 30, (plain, kept)
    errors.clear()
    assert not errors.worker.any()
    assert not errors.server.any()
    x = values(comm.rank, count)
    compressed_all_reduce(comm, x, errors)
    assert torch.equal(x, first)


def check_refusals(world):
    """Errors of another buffer or other ranks, dtypes and layouts are named; nothing travels and nothing changes."""
    comm, count = world.comm, 100
    errors, x = OneBitErrors.zeros(count, comm.size), values(comm.rank, count)
    before, entries = x.clone(), comm.comm_trace.entries().get((VERB, comm.axes))
    for wrong in (
        OneBitErrors.zeros(1000, comm.size),
        OneBitErrors(errors.worker, errors.server.repeat(2)),
        OneBitErrors(errors.worker[:count], errors.server),
    ):
        with pytest.raises(CommError, match=rf"for 100 elements on {comm.size} ranks; make them with OneBitErrors"):
            compressed_all_reduce(comm, x, wrong)
    with pytest.raises(CommError, match=r"x has dtype torch\.float64; use fp32"):
        compressed_all_reduce(comm, x.double(), errors)
    with pytest.raises(CommError, match="contiguous"):
        compressed_all_reduce(comm, x.repeat(2)[::2], errors)
    with pytest.raises(CommError, match=r"make them with zero_errors\(100, 1, 1\)"):
        alone = solo_comm()
        onebit_nodes.exchange_through(alone, alone, x, OneBitErrors.zeros(1000, 1), [])
    assert torch.equal(x, before)
    assert comm.comm_trace.entries().get((VERB, comm.axes)) == entries
    assert not errors.worker.any()


def check_not_finite(world):
    """A NaN or an infinity on one rank reaches all, and is gone once the errors are cleared."""
    comm, count = world.comm, 90
    errors = OneBitErrors.zeros(count, comm.size)
    for bad in (float("nan"), float("inf")):
        x = values(comm.rank, count)
        if comm.rank == comm.size - 1:
            x[count // 2] = bad
        compressed_all_reduce(comm, x, errors)
        assert not x.isfinite().any()
        errors.clear()
        compressed_all_reduce(comm, x.copy_(values(comm.rank, count)), errors)
        assert x.isfinite().all()
        errors.clear()


def check_through(world, dtype):
    """In full precision inside a node: against the reference of each shard, bits on all ranks, bytes between nodes."""
    skipped = total = 0
    for mesh, inner, outer in meshes(world):
        near, far = mesh["inner"], mesh["outer"]
        for count in (1, 97, 8 * world.size * 5):
            length = shard_length(count, inner, outer)
            assert length * inner == padded_length(count, world.size)
            errors, same = zero_errors(count, inner, outer), zero_errors(count, inner, outer)
            for turn in range(3):
                full = [values(rank, count, dtype, turn) for rank in range(world.size)]
                x, begin = full[world.rank].clone(), near.rank * length
                beside = beside_shard(far, full, errors, begin, length)
                before = sent(mesh, "outer", VERB)
                compressed_all_reduce_through(near, far, x, errors)
                after = sent(mesh, "outer", VERB)
                assert after == (before[0] + 1, before[1] + 2 * (outer - 1) * (length // (8 * outer) + 4))
                skipped += beside.check(far.rank, x[begin : begin + length], errors, dtype)
                total += length
                assert len(set(world.comm.gather_objects(digest(x)))) == 1
                if inner == 1:
                    alone = full[world.rank].clone()
                    compressed_all_reduce(far, alone, same)
                    assert torch.equal(x, alone)
                    assert torch.equal(errors.worker, same.worker)
                    assert torch.equal(errors.server, same.server)
    assert skipped <= 2e-3 * total, (skipped, total)  # means of few 16-bit values may be 0


def beside_shard(far, full, errors, begin, length):
    """The reference between nodes, on a shard of the means of their ranks; these are rounded once per addition."""
    inner = len(full) // far.size
    padded = [torch.nn.functional.pad(y.double(), (0, inner * length))[begin : begin + length] for y in full]
    nodes = [torch.stack(padded[o * inner : (o + 1) * inner]) for o in range(far.size)]
    blurs = [(inner if inner > 1 else 0) * 2.0**-24 * node.abs().mean(0) for node in nodes]
    kept = gathered(far, errors.worker, errors.server)
    return Beside(wide(node.mean(0) for node in nodes), *kept, wide(blurs))
