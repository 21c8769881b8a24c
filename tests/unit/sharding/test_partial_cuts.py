"""Gradients cut over a part of the data axes (MiCS), or over all of them in two hops (hpZ)."""

import pytest
import torch

from mpispeed.mesh import sim
from mpispeed.sharding.grad_shards import global_square_sum
from mpispeed.sharding.reducers import Averaging, PlainReducer
from tests.helpers.stores import DATA, INNER, NESTED, NODES, WHOLE, backward, collect, gradient, mesh_of, store_of
from tests.zoo import same_bits

CUTS = {  # placement, ranks, inner, local
    "inner 1 of 2": (INNER, 2, 1, 0),
    "inner 2 of 4": (INNER, 4, 2, 0),
    "inner 4 of 4": (INNER, 4, 4, 0),
    "nested 2 of 4": (NESTED, 4, 2, 0),
    "nested 1 of 2": (NESTED, 2, 1, 0),
    "nodes 2 in 4 of 4": (NODES, 4, 4, 2),
    "nodes 1 in 2 of 4": (NODES, 4, 2, 1),
}
ROWS = pytest.mark.parametrize("row", sorted(CUTS))


def stage_2(world, micros, **more):
    """What a plain cut over all ranks gives, as whole buffers, and its norm."""
    mesh = mesh_of(world)
    store = store_of(mesh, DATA, **more)
    for micro in range(micros):
        backward(store, world.rank, micro, reduces=micro == micros - 1)
    store.finish()
    result = collect(mesh, store), global_square_sum(mesh, store.shards, threads=1)[0]
    mesh.close()
    return result


@ROWS
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [True, False])
def test_one_micro_step_has_the_bits_of_stage_2(row, overlap, wire, known):
    """Groups are powers of two, so inner sums first is the same tree; 16-bit sums stay in fp32 between hops."""
    placement, ranks, inner, local = CUTS[row]

    def work(world):
        mesh = mesh_of(world, inner, local)
        store = store_of(mesh, placement, is_overlapped=overlap, wire=wire)
        backward(store, world.rank, 0, reduces=known)
        store.finish()
        found, norm = collect(mesh, store), global_square_sum(mesh, store.shards, threads=1)[0]
        assert store.shards.arena.taken_count == 0
        mesh.close()
        expected, expected_norm = stage_2(world, 1, wire=wire)
        same_bits(found, expected)
        assert norm == expected_norm

    sim.run(ranks, work)


@ROWS
def test_all_buffers_of_a_bucket_sum_into_16_bit_accumulators_as_at_stage_2(row):
    placement, ranks, inner, local = CUTS[row]

    def work(world):
        mesh = mesh_of(world, inner, local)
        settings = {"accumulate": torch.bfloat16, "wire": torch.bfloat16}
        store = store_of(mesh, placement, **settings)
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        found = collect(mesh, store)
        mesh.close()
        expected, _ = stage_2(world, 1, **settings)
        for ours, theirs in zip(found, expected, strict=True):
            # copies are summed once more from bf16: one rounding of half a unit in 8 bits for each partial sum
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)
            if placement is NESTED:
                assert torch.equal(ours, theirs)

    sim.run(ranks, work)


def mean_of(size, micros, unit):
    whole = torch.zeros(unit.layout.padded)
    for entry in unit.layout.entries:
        total = sum(gradient(r, m, entry) for r in range(size) for m in micros)
        whole[entry.span.slice] = (total / size).reshape(-1)
    return whole


def check_mean(mesh, store, micros):
    for unit, found in zip(store.table.units, collect(mesh, store), strict=True):
        torch.testing.assert_close(found, mean_of(mesh["data"].size, micros, unit), rtol=1e-5, atol=2e-6)


@ROWS
@pytest.mark.parametrize("overlap", [False, True])
def test_boundaries_known_late_missed_and_repeated(row, overlap):
    placement, ranks, inner, local = CUTS[row]

    def work(world):
        mesh = mesh_of(world, inner, local)
        store = store_of(mesh, placement, is_overlapped=overlap)
        for micro, is_boundary in enumerate([False, False, True]):
            backward(store, world.rank, micro, reduces=is_boundary)
        store.finish()
        check_mean(mesh, store, range(3))
        store.finish()  # nothing is summed twice
        check_mean(mesh, store, range(3))
        backward(store, world.rank, 3, reduces=False)  # after a boundary that was not stepped
        backward(store, world.rank, 4, reduces=True)
        backward(store, world.rank, 5, reduces=True)
        backward(store, world.rank, 6, reduces=False)
        store.finish()
        check_mean(mesh, store, range(7))
        store.clear()
        backward(store, world.rank, 7, reduces=False)
        store.clear()  # given up before any boundary
        backward(store, world.rank, 8, reduces=True)
        store.finish()
        check_mean(mesh, store, [8])
        assert store.shards.arena.taken_count == 0
        mesh.close()

    sim.run(ranks, work)


@pytest.mark.parametrize("averaging", [(True, 1.0), (False, 2.0), (False, 3.0)])
@pytest.mark.parametrize("row", ["inner 2 of 4", "nested 2 of 4", "nodes 2 in 4 of 4"])
def test_prescale_and_predivide(row, averaging):
    placement, ranks, inner, local = CUTS[row]

    def work(world):
        mesh = mesh_of(world, inner, local)
        factors = Averaging.of(ranks, is_prescaled=averaging[0], predivide=averaging[1])
        store = store_of(mesh, placement, averaging=factors)
        for micro in range(2):
            backward(store, world.rank, micro, reduces=micro == 1)
        store.finish()
        check_mean(mesh, store, range(2))
        mesh.close()

    sim.run(ranks, work)


def sent(mesh):
    """Elements that this rank sent, by verb and axes; fp32."""
    return {key: entry.bytes / 4 for key, entry in mesh.comm_trace.entries().items() if entry.bytes}


def test_traffic_of_mics():
    """Reduce-scatter in the group every micro-step, one all-reduce of a shard over the groups at the boundary."""
    micros, ranks, inner = 3, 4, 2

    def work(world):
        mesh = mesh_of(world, inner)
        store = store_of(mesh, INNER)
        psi = sum(unit.layout.padded for unit in store.table.units)
        for micro in range(micros):
            backward(store, world.rank, micro, reduces=micro == micros - 1)
            scattered = (micro + 1) * psi * (inner - 1) / inner
            expected = {("reduce_scatter", ("data.inner",)): scattered}
            if micro == micros - 1:
                replicas = ranks // inner
                expected[("all_reduce", ("data.outer",))] = 2 * psi / inner * (replicas - 1) / replicas
            assert sent(mesh) == expected
        store.finish()
        assert sent(mesh) == expected
        mesh.close()

    sim.run(ranks, work)


def test_traffic_of_two_hops():
    ranks, inner = 4, 2

    def work(world):
        mesh = mesh_of(world, inner)
        store = store_of(mesh, NESTED)
        psi = sum(unit.layout.padded for unit in store.table.units)
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        assert sent(mesh) == {
            ("reduce_scatter", ("data.inner",)): psi / 2,
            ("reduce_scatter", ("data.outer",)): psi / 4,
        }
        mesh.close()

    sim.run(ranks, work)


@pytest.mark.parametrize("row", ["whole", *sorted(CUTS)])
@pytest.mark.parametrize("rest_is_whole", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_reduce_of_whole_buckets(row, rest_is_whole, overlap):
    """`reduce_scatter: false`: every rank sums everything and takes its range; the bits stay."""
    placement, ranks, inner, local = CUTS.get(row, (DATA, 4, 0, 0))

    def work(world):
        mesh = mesh_of(world, inner, local)
        rest = WHOLE if rest_is_whole else placement
        reducer = PlainReducer(scatters=False)
        store = store_of(mesh, rest, placement, reducer=reducer, is_overlapped=overlap)
        backward(store, world.rank, 0, reduces=True)
        store.finish()
        found, traffic = collect(mesh, store), sent(mesh)
        mesh.close()
        assert {verb for verb, _ in traffic} <= {"all_reduce"}
        if row == "whole":
            psi = sum(unit.layout.padded for unit in store.table.units)
            assert traffic == {("all_reduce", ("data",)): 2 * psi * (ranks - 1) / ranks}
        expected, _ = stage_2(world, 1)
        same_bits(found, expected)

    sim.run(ranks, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rest", [WHOLE, DATA])
def test_wire_and_accumulation_dtypes(size, wire, accumulate, rest):
    def work(world):
        mesh = mesh_of(world)
        store = store_of(mesh, rest, DATA, wire=wire, accumulate=accumulate)
        for micro in range(2):
            backward(store, world.rank, micro, reduces=micro == 1)
        store.finish()
        assert {store.shards.reduced(unit).dtype for unit in store.table.units} == {accumulate}
        bits = min({torch.float16: 11, torch.bfloat16: 8, torch.float32: 20}[kind] for kind in (wire, accumulate))
        bound = 5 * 2.0**-bits  # gradients, sums and the accumulator are rounded, values are of order 1
        for unit, found in zip(store.table.units, collect(mesh, store), strict=True):
            torch.testing.assert_close(found, mean_of(size, range(2), unit), rtol=bound, atol=bound)
        # every bucket travels in the wire's dtype
        psi, passes = sum(unit.layout.padded for unit in store.table.units), 1 if rest is WHOLE else 2
        moved = mesh.comm_trace.total_bytes("reduce_scatter")
        assert moved == passes * psi * wire.itemsize * (size - 1) / size
        mesh.close()

    sim.run(size, work)
