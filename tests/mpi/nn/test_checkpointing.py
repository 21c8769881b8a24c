"""Partitioned activations over real ranks: the same bits, a slice of the memory, errors instead of hangs."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpispeed import checkpointing
from mpispeed.base.errors import AgreementError, CommError
from mpispeed.mesh import Mesh, Topology

pytestmark = pytest.mark.mpi

WIDTH, HIDDEN = 8, 24


@pytest.fixture
def mesh(world):
    made = Mesh(Topology({"model": world.size}), world)
    yield made
    checkpointing.configure()
    checkpointing.get_rng_tracker().reset()
    made.close()


class _Sum(torch.autograd.Function):
    """Adds up what the ranks have, in forward; or in backward."""

    @staticmethod
    def forward(ctx, x, comm, is_backward):
        ctx.comm, ctx.is_backward = comm, is_backward
        x = x.contiguous().clone()
        if not is_backward:
            comm.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.is_backward:
            ctx.comm.all_reduce(grad)
        return grad, None, None


class Sliced(nn.Module):
    """A layer cut by columns and by rows, with a dropout of its own on each slice and an equal one on the sum."""

    def __init__(self, comm, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(HIDDEN, WIDTH, generator=generator) for _ in range(2))
        self.comm = comm
        self.first = nn.Parameter(first.tensor_split(comm.size)[comm.rank].clone())
        self.second = nn.Parameter(second.tensor_split(comm.size)[comm.rank].clone())
        self.masks = []

    def forward(self, x, scale=None):
        h = F.gelu(F.linear(_Sum.apply(x, self.comm, True), self.first))
        with checkpointing.get_rng_tracker().fork():
            h = F.dropout(h, 0.4)
        self.masks.append((h != 0).detach())
        out = F.dropout(_Sum.apply(h @ self.second, self.comm, False), 0.3)
        return torch.tanh(x + out if scale is None else x + out * scale)


def train(mesh, call, rows, **options):
    """Two micro-batches through three layers; all gradients."""
    checkpointing.configure(mesh["model"], **options)
    checkpointing.model_parallel_manual_seed(11)
    layers = [Sliced(mesh["model"], seed) for seed in range(3)]
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(rows, WIDTH, generator=generator).requires_grad_() for _ in range(2)]
    scale = torch.rand(WIDTH, generator=generator)
    losses = []
    for x in batches:
        for layer in layers:
            x = call(layer, x, scale)
        losses.append(x.square().sum())
    kept = checkpointing.kept_bytes()
    for loss in reversed(losses):
        loss.backward()
    assert checkpointing.kept_bytes() == 0
    grads = [x.grad for x in batches] + [p.grad for layer in layers for p in layer.parameters()]
    return kept, grads, [layer.masks for layer in layers]


@pytest.mark.parametrize("rows", [12, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"contiguous_checkpointing": True, "num_checkpoints": 6},
        {"checkpoint_in_cpu": True},
        {"contiguous_checkpointing": True, "num_checkpoints": 6, "checkpoint_in_cpu": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_gradients_have_the_same_bits(mesh, comm, options, rows):
    _, expected, _ = train(mesh, lambda fn, *args: fn(*args), rows)
    whole, plain, _ = train(mesh, checkpointing.checkpoint, rows)
    kept, found, masks = train(mesh, checkpointing.checkpoint, rows, partition_activations=True, **options)
    for a, b, c in zip(expected, plain, found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    # Each rank keeps its slice of both arguments, the last one padded.
    slices = sum(-(-count // comm.size) for count in (rows * WIDTH, WIDTH))
    assert whole == 4 * 6 * (rows * WIDTH + WIDTH)
    assert kept == 4 * 6 * slices
    if comm.size in (1, 2, 4) and rows == 12:
        assert kept * comm.size == whole
    # First runs of both micro-batches, then the second ones in the order of backward.
    for first, second, *again in masks:
        assert torch.equal(second, again[0])
        assert torch.equal(first, again[1])


def test_streams_of_the_axes(mesh, comm):
    """Equal over the slicing group by default, different in a fork, equal again for everyone after it."""
    checkpointing.configure(mesh["model"])
    checkpointing.model_parallel_manual_seed(11)
    before = torch.rand(4)
    with checkpointing.get_rng_tracker().fork():
        own = torch.rand(4)
    after = torch.rand(4)
    told = comm.gather_objects([t.tolist() for t in (before, own, after)])
    assert len({str((first, last)) for first, _, last in told}) == 1
    assert len({str(middle) for _, middle, _ in told}) == comm.size
    torch.manual_seed(11 + 2718 + comm.rank)
    assert torch.equal(own, torch.rand(4))


def test_traffic_is_one_message_for_each_call(mesh, comm):
    checkpointing.configure(mesh["model"], partition_activations=True)
    x, y = (torch.arange(4.0 * size).requires_grad_() for size in (comm.size, 2 * comm.size))
    out = checkpointing.checkpoint(lambda a, b: torch.tanh(a).sum() + torch.tanh(b).sum(), x, y)
    assert not mesh.comm_trace.entries()
    out.backward()
    entries = mesh.comm_trace.entries()
    if comm.size == 1:
        assert not entries
        return
    ((verb, axes),) = entries
    assert (verb, axes) == ("all_gather", ("model",))
    assert entries[verb, axes].count == 1
    # What the others need, and eight samples of each activation.
    assert entries[verb, axes].bytes == (comm.size - 1) * ((x.nbytes + y.nbytes) // comm.size + 2 * 8 * 4)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("rows", [4, 2])
def test_a_rank_that_checkpoints_one_call_more(mesh, comm, rows):
    checkpointing.configure(mesh["model"], partition_activations=True)
    x = checkpointing.checkpoint(torch.tanh, torch.ones(4, 8, requires_grad=True))
    if comm.rank == comm.size - 1:
        x = checkpointing.checkpoint(torch.tanh, x[:rows])
    with pytest.raises(AgreementError, match="checkpointed call 1") as caught:
        x.sum().backward()
    assert "checkpointed call 2" in str(caught.value)
    assert caught.value.is_collective
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_checkpoints_nothing(mesh, comm):
    """It never comes: the others are told after the time-out of the group."""
    group = mesh["model"]
    group.started.group.limits.timeout_seconds = 0.5
    checkpointing.configure(group, partition_activations=True)
    x, begin = torch.ones(4, 8, requires_grad=True), time.monotonic()
    if comm.rank > 0:
        loss = checkpointing.checkpoint(torch.tanh, x).sum()
        with pytest.raises(CommError, match=r"checkpointed call 1.*not all ranks came within 0.5 s"):
            loss.backward()
    assert time.monotonic() - begin < 20
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_activations_that_are_cut_already(mesh, comm):
    checkpointing.configure(mesh["model"], partition_activations=True)
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(6, 8, generator=generator).requires_grad_()
    loss = checkpointing.checkpoint(torch.tanh, x).sum()
    with pytest.raises(AgreementError, match=r"shape \(6, 8\) differs between ranks 0 and 1.*mark_cut"):
        loss.backward()
    y = x.detach().clone().requires_grad_()
    loss = checkpointing.checkpoint(torch.tanh, checkpointing.mark_cut(y)).sum()
    assert checkpointing.kept_bytes() >= y.nbytes
    loss.backward()
    assert torch.equal(y.grad, torch.autograd.grad(torch.tanh(x).sum(), x)[0])
