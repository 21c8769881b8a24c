"""Sums that round: within the bounds of their dtype, and no farther from the true sum than gloo's."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.torch_verbs import IS_GLOO_OLD, single

pytestmark = pytest.mark.mpi(min_size=1)
COUNT = 12 * 400
# Of the sum of magnitudes: each of n - 1 additions in fp32 rounds once; 16 bits are summed in fp32 and rounded once.
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def part(rank, dtype):
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(COUNT, generator=generator) * torch.randn(COUNT, generator=generator).exp()).to(dtype)


def all_reduce(group, x, op):
    dist.all_reduce(x, op, group)
    return x


def reduce(group, x, op):
    dist.reduce(x, 0, op, group)
    return x


def reduce_scatter(group, x, op):
    out = x.new_empty(COUNT // dist.get_world_size(group))
    single["reduce_scatter"](out, x, op, group)
    return out


def mine(x, verb, groups):
    """The elements of `x` that this rank has after the verb."""
    if verb is reduce:
        return x if groups.me == 0 else x[:0]
    return x.chunk(len(groups.ranks))[groups.me] if verb is reduce_scatter else x


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("verb", (all_reduce, reduce, reduce_scatter))
@pytest.mark.parametrize("op", ("SUM", "AVG"))
def test_sums_that_round(verb, dtype, op, both):
    groups = both["world"]
    size = len(groups.ranks)
    parts = [part(rank, dtype) for rank in range(size)]
    divisor = size if op == "AVG" else 1
    exact = mine(torch.stack([x.double() for x in parts]).sum(0) / divisor, verb, groups)
    magnitude = mine(torch.stack([x.double().abs() for x in parts]).sum(0) / divisor, verb, groups)
    ours, gloo = (
        mine(verb(group, parts[groups.me].clone(), getattr(dist.ReduceOp, op)), verb, groups)[: len(exact)]
        if verb is reduce
        else verb(group, parts[groups.me].clone(), getattr(dist.ReduceOp, op))
        for group in groups[1:]
    )
    if IS_GLOO_OLD and verb is reduce_scatter and op == "AVG":
        gloo = gloo / size
    error, theirs = ((x.double() - exact).abs() for x in (ours, gloo))
    # A quotient rounds once more.
    roundings = size - 1 + (op == "AVG" and size > 1) if dtype == torch.float32 else 1
    assert bool((error <= roundings * UNITS[dtype] * magnitude).all())
    if size <= 2:
        assert torch.equal(ours, gloo)
    elif dtype == torch.float32:
        assert error.mean() <= 1.1 * theirs.mean() if len(error) else True
    else:
        assert bool((error <= theirs + 2.0**-24 * magnitude).all())
