"""Borders of cut regions on simulated ranks, also where lengths do not divide."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import UsageError
from mpispeed.mesh import sim
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.entry import Entry, SequenceCut


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize(("size", "length"), [(1, 3), (2, 4), (3, 7), (4, 2), (5, 11)])
def test_gather_and_scatter(size, length, dim):
    """Both ways around, and gradients of a loss that all ranks compute alike."""
    shape = [2, 3, 4]
    shape[dim] = length
    whole = data(*shape)

    def work(world):
        x = whole.clone().requires_grad_()
        part = regions.scatter_to(x, world.comm, dim)
        back = regions.gather_from(part * 2, world.comm, dim, length)
        back.square().sum().backward()
        return part.detach(), back.detach(), x.grad

    for rank, (part, back, grad) in enumerate(sim.run(size, work)):
        assert torch.equal(part, torch.tensor_split(whole, size, dim)[rank])
        assert torch.equal(back, 2 * whole)
        assert torch.allclose(grad, 8 * whole)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("size", "length"), [(2, 4), (3, 7), (4, 2)])
def test_sequence_borders(size, length, dim):
    """Each rank weighs the whole sequence by itself; sums of parts have the gradients of the whole sum."""
    whole = data(length, 3) if dim == 0 else data(3, length)
    weights = [data(*whole.shape, seed=rank + 1) for rank in range(size)]

    def work(world):
        own = torch.tensor_split(whole, size, dim)[world.rank].clone().requires_grad_()
        full = regions.gather_sequence(own, world.comm, dim, length)
        out = regions.reduce_scatter_sequence(full * weights[world.rank], world.comm, dim)
        out.square().sum().backward()
        return out.detach(), own.grad

    total = torch.stack(weights).sum(0)
    for rank, (out, grad) in enumerate(sim.run(size, work)):
        assert torch.allclose(out, torch.tensor_split(whole * total, size, dim)[rank])
        assert torch.allclose(grad, torch.tensor_split(2 * whole * total**2, size, dim)[rank])


def test_sums_in_16_bits_and_of_strided_tensors():
    def work(world):
        x = torch.full((4, 3), 1.0 + world.rank, dtype=torch.bfloat16).t().requires_grad_()
        out = regions.reduce_from(x, world.comm)
        regions.copy_to(out, world.comm).sum().backward()
        return out.detach(), x.grad

    for out, grad in sim.run(3, work):
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, torch.full((3, 4), 6.0, dtype=torch.bfloat16))
        assert torch.equal(grad, torch.full((3, 4), 3.0, dtype=torch.bfloat16))


def test_a_sum_in_place_keeps_gradients():
    def work(world):
        x = data(2, 3).requires_grad_()
        y = x * (world.rank + 1)
        out = regions.reduce_from(y, world.comm, is_own=True)
        out.square().sum().backward()
        return out is y or out.data_ptr() == y.data_ptr(), x.grad

    for rank, (is_same, grad) in enumerate(sim.run(2, work)):
        assert is_same
        assert torch.allclose(grad, 2 * 3 * data(2, 3) * (rank + 1))


def test_a_part_of_another_length_is_named():
    def wrong(world):
        length = 7 if world.rank else 9
        with pytest.raises(UsageError, match=rf"rank {world.rank} of 2 has 4 of {length} along dim 0; its part has"):
            regions.gather_from(torch.zeros(4), world.comm, 0, length)

    sim.run(2, wrong)


def verbs(world, name):
    return sum(entry.count for (verb, _), entry in world.comm.comm_trace.entries().items() if verb == name)


def test_an_input_crosses_once():
    def work(world):
        entry = Entry(world.comm, users=3)
        x = data(2, 3).requires_grad_()
        outs = [entry(x) for _ in range(3)]
        assert outs[0] is outs[1] is outs[2]
        assert entry(x) is not outs[0]  # the fourth is the first of the next pass
        sum(outs).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))
        return verbs(world, "all_reduce")

    assert sim.run(2, work) == [1, 1]


def test_changed_or_other_inputs_cross_again():
    def work(world):
        entry = Entry(world.comm, users=3)
        x = data(2, 3).requires_grad_() * 1.0
        first = entry(x)
        x.mul_(2.0)
        assert entry(x) is not first
        other = entry(x.clone())
        del other
        with torch.no_grad():
            assert entry(x) is x
        with torch.inference_mode():
            inner = data(2, 3)
            assert entry(inner) is inner

    sim.run(2, work)


def test_nothing_is_kept_of_an_input_that_died():
    def work(world):
        entry = Entry(world.comm, SequenceCut(), users=2)
        with torch.no_grad():
            entry(data(1, 2, 3))
        return entry._kept is None

    assert sim.run(2, work) == [True, True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_regions(use_reentrant):
    def work(world):
        entry = Entry(world.comm, users=2)
        weight = data(3, 3, seed=world.rank + 1).requires_grad_()

        def region(x):
            return regions.reduce_from((entry(x) @ weight).tanh() + entry(x), world.comm, is_own=True)

        results = []
        for is_recomputed in (False, True):
            x = data(2, 3).requires_grad_()
            weight.grad = None
            out = checkpoint(region, x, use_reentrant=use_reentrant) if is_recomputed else region(x)
            out.square().sum().backward()
            results.append((x.grad, weight.grad))
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    assert sim.run(2, work) == [True, True]
