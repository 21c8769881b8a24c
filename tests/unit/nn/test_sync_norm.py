"""SyncBatchNorm over simulated ranks against BatchNorm of all samples in one process."""

import copy

import pytest
import torch
from torch import nn

from mpispeed.mesh import sim
from mpispeed.nn.sync_norm import release_norms, synchronise_norms

CHANNELS = 3


def by_hand(norm, x, upstream):
    """Outputs, gradients of the input and the parameters, and buffers after one pass in training."""
    norm, x = copy.deepcopy(norm).double(), x.clone().requires_grad_()
    y = norm(x)
    y.backward(upstream)
    return y.detach(), x.grad, {name: param.grad for name, param in norm.named_parameters()}, dict(norm.named_buffers())


@pytest.mark.parametrize("counts", [(2, 2), (1, 4, 2), (5, 0)], ids=str)
@pytest.mark.parametrize(
    ("make", "inner"),
    [
        (lambda: nn.BatchNorm1d(CHANNELS), ()),
        (lambda: nn.BatchNorm1d(CHANNELS, momentum=None), (4,)),
        (lambda: nn.BatchNorm2d(CHANNELS, affine=False), (2, 3)),
        (lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False), (2, 3)),
    ],
)
def test_ranks_together_are_one_process(make, inner, counts):
    torch.manual_seed(3)
    norm = make()
    for param in norm.parameters():
        nn.init.normal_(param)
    x = torch.randn(sum(counts), CHANNELS, *inner, dtype=torch.float64) * 2 + 5
    upstream = torch.randn_like(x)

    def fn(world):
        own = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
        synchronise_norms(own, world.comm)
        return by_hand(own, x.split(counts)[world.rank], upstream.split(counts)[world.rank])

    ranks = sim.run(len(counts), fn)
    y, grad, params, buffers = by_hand(norm, x, upstream)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), y)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), grad)
    for name, expected in params.items():
        torch.testing.assert_close(torch.stack([rank[2][name] for rank in ranks]).sum(0), expected)
    for rank in ranks:
        torch.testing.assert_close(rank[3], buffers)


def test_halves_are_summed_in_fp32():
    torch.manual_seed(3)
    x = (torch.randn(64, CHANNELS) + 3).bfloat16()
    norm = nn.SyncBatchNorm(CHANNELS).bfloat16()

    def fn(world):
        own = copy.deepcopy(norm)
        synchronise_norms(own, world.comm)
        part = x.chunk(2)[world.rank].clone().requires_grad_()
        y = own(part)
        y.float().square().sum().backward()
        return y.detach(), part.grad.dtype, own.weight.grad.dtype

    ranks = sim.run(2, fn)
    expected = nn.functional.batch_norm(x.float(), None, None, training=True)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]).float(), expected, rtol=2**-7, atol=2**-7)
    assert all(kinds == [torch.bfloat16] * 2 for kinds in ([*rank[1:]] for rank in ranks))


def test_only_norms_without_a_group_of_torch_are_taken_and_given_back():
    class Own(nn.SyncBatchNorm):
        pass

    def fn(world):
        model = nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2))
        assert synchronise_norms(model, world.comm) == ""
        other = copy.deepcopy(model)
        kinds = [type(part) for part in model]
        release_norms(model)
        assert [type(part) for part in model] == [nn.SyncBatchNorm, nn.BatchNorm1d]
        assert [type(part) for part in other] == kinds
        model.eval()
        model(torch.ones(1, 2))
        return synchronise_norms(nn.Sequential(Own(2)), world.comm)

    assert all("0 is a Own, a class derived from SyncBatchNorm" in text for text in sim.run(2, fn))


def test_a_second_derivative_is_refused_and_not_wrong():
    def work(world):
        model = nn.SyncBatchNorm(CHANNELS)
        synchronise_norms(model, world.comm)
        x = torch.ones(4, CHANNELS).cumsum(0).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(grad.square().sum(), x)

    sim.run(2, work)
