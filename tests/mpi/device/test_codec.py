"""Quantized gathers and reductions of tensors on a device: coded there, with the bytes and results of the host."""

import pytest
import torch

from mpispeed.mesh.compressed.quantized import (
    Feedback,
    gather_codes_through,
    quantized_all_gather,
    quantized_gather_through,
    quantized_reduce_scatter,
)
from mpispeed.native.block_quant import quantize
from mpispeed.native.codes import Coded, Grid

BLOCK = 256


def noise(rank, count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def grid_of(comm):
    """Inner and outer groups: two ranks inside where that goes."""
    inner = 2 if comm.size % 2 == 0 else comm.size
    place = comm.rank // inner
    return (
        comm.split(place, list(range(place * inner, (place + 1) * inner)), ("inner",)),
        comm.split(comm.rank % inner, list(range(comm.rank % inner, comm.size, inner)), ("outer",)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathers_are_those_of_the_host(comm, device, dtype):
    shard, host = noise(comm.rank, 1001, dtype), torch.zeros(1001 * comm.size, dtype=dtype)
    comm.comm_trace.reset()
    quantized_all_gather(comm, host, shard, block=BLOCK)
    sent = comm.comm_trace.total_bytes()
    # The shard or the result may be on the host, as where parameters are kept there.
    for out, part in ((device, device), (device, "cpu"), ("cpu", device)):
        found = torch.zeros_like(host, device=out)
        comm.comm_trace.reset()
        quantized_all_gather(comm, found, shard.to(part), block=BLOCK)
        assert torch.equal(found.cpu(), host)
        assert comm.comm_trace.total_bytes() == sent


@pytest.mark.ranks(1, 3)
def test_codes_that_are_kept_on_either_side_come_to_a_device(comm, device):
    shard, grid, found = noise(comm.rank, 1001), Grid(1001, BLOCK), []
    for out, place in (("cpu", "cpu"), (device, "cpu"), (device, device)):
        own, whole = Coded.zeros(grid, 8, place), torch.zeros(1001 * comm.size, device=out)
        quantize(own, shard.to(place), grid)
        gather_codes_through([comm], whole, own, block=BLOCK)
        found.append(whole.cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].any()


@pytest.mark.ranks(3, 4)
def test_sums_through_two_groups_with_kept_errors_are_those_of_the_host(comm, device):
    inner, outer = grid_of(comm)
    both = {"cpu": Feedback(reset_after=3), device: Feedback(reset_after=3)}
    for seed in range(4):
        full = noise(comm.rank, 700 * comm.size, torch.bfloat16, seed)
        results = []
        for place, feedback in both.items():
            shard, there = torch.zeros(700, device=place), full.to(place)
            quantized_reduce_scatter(inner, outer, shard, there, block=BLOCK, scale=0.5, feedback=feedback)
            results.append(shard.cpu())
        assert torch.equal(*results)
        assert both[device].nbytes == both["cpu"].nbytes
    # Errors that were kept on the device go with the values.
    both[device].rescale(2.0)
    both["cpu"].rescale(2.0)
    found = [torch.zeros(700), torch.zeros(700)]
    for shard, feedback in zip(found, both.values(), strict=True):
        quantized_reduce_scatter(inner, outer, shard, full, block=BLOCK, feedback=feedback)
    assert torch.equal(*found)
    gathered = [torch.zeros(700 * comm.size), torch.zeros(700 * comm.size, device=device)]
    for out in gathered:
        quantized_gather_through([outer, inner], out, found[0].to(out.device), block=BLOCK)
    assert torch.equal(gathered[0], gathered[1].cpu())
    inner.close()
    outer.close()


@pytest.mark.ranks(1, 2)
def test_a_sum_of_values_on_a_device_may_end_on_the_host(comm, device):
    alone = comm.split(comm.rank, [comm.rank], ("own",))
    full = noise(comm.rank, 300 * comm.size)
    shards = [torch.zeros(300), torch.zeros(300), torch.zeros(300, device=device)]
    for shard, place in zip(shards, ("cpu", device, "cpu"), strict=True):
        quantized_reduce_scatter(comm, alone, shard, full.to(place), block=BLOCK)
    assert torch.equal(shards[0], shards[1])
    assert torch.equal(shards[0], shards[2].cpu())
    alone.close()
