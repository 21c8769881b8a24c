"""Checkpointed calls in the orders of pipelines: many micro-batches under way, backward in one pass or in two."""

import itertools

import pytest
import torch
from torch import nn

from mpispeed import checkpointing
from mpispeed.base import split_grads
from mpispeed.checkpointing import Checkpointer, checkpoint
from mpispeed.mesh import sim
from mpispeed.nn.checkpointing_options import Options
from tests.zoo import same_bits

BATCHES, LAYERS, WIDTH = 4, 3, 8


class Layer(nn.Module):
    """Linear layers, a convolution and dropout."""

    def __init__(self, rate=0.3):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.mix = nn.Conv1d(1, 1, 3, padding=1)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        h = self.mix(torch.tanh(self.first(x))[:, None])[:, 0]
        return torch.tanh(x + self.last(self.dropout(h)))


def model(rate=0.3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleList(Layer(rate) for _ in range(LAYERS))


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, WIDTH, generator=generator).requires_grad_() for _ in range(BATCHES)]


def run(call, order, put_off=False, layers=None):
    """All forward passes, then the backward passes in this order; weight gradients at once, or all at the end."""
    if layers is None:
        layers = model()
        torch.manual_seed(7)
    inputs, outs = batches(), []
    backlog, undo = split_grads.Backlog(), split_grads.split(layers)
    for x in inputs:
        h = x
        for layer in layers:
            h = call(layer, h)
        outs.append(h.square().sum())
    for index in order:
        if not put_off:
            outs[index].backward()
            continue
        with split_grads.put_off(backlog):
            outs[index].backward()
        outs[index] = None  # graphs and what they keep are gone before the weight passes
    assert all(p.grad is None for layer in layers for p in (layer.first.weight, layer.mix.weight)) == put_off
    backlog.work_off(deliver)
    undo()
    return [x.grad for x in inputs] + [p.grad for p in layers.parameters()]


def deliver(param, grad):
    param.grad = grad if param.grad is None else param.grad + grad


@pytest.fixture(autouse=True)
def defaults():
    with torch.random.fork_rng(devices=[]):
        yield
    checkpointing.configure()
    assert checkpointing.kept_bytes() == 0


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("options", [{}, {"partition_activations": True, "contiguous_checkpointing": True,
                                          "num_checkpoints": BATCHES * LAYERS}])  # fmt: skip
@pytest.mark.parametrize("order", list(itertools.permutations(range(BATCHES)))[::5])
def test_any_order(order, options, put_off):
    expected = run(lambda fn, *args: fn(*args), order, put_off)
    checkpointing.configure(None, **options)
    same_bits(run(checkpoint, order, put_off), expected)


@pytest.mark.parametrize("put_off", [False, True])
def test_each_layer_runs_again_once(put_off):
    runs = []

    def call(layer, x):
        return checkpoint(lambda a: (runs.append(1), layer(a))[1], x)

    run(call, range(BATCHES), put_off)
    assert len(runs) == 2 * BATCHES * LAYERS


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_slices_of_many_micro_batches(order):
    """The ranks of a slicing group run the same schedule; weight passes come when slices and slots are gone."""
    expected = run(lambda fn, *args: fn(*args), order, put_off=True, layers=model(0.0))
    made = [model(0.0) for _ in range(2)]  # not by the ranks: they are threads here, and share torch's generator
    options = Options(
        partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=BATCHES * LAYERS
    )

    def fn(world):
        checkpointer = Checkpointer(options, world.comm)
        # Switching weight gradients is a matter of the process, and ranks are threads here.
        same_bits(run(checkpointer.checkpoint, order, layers=made[world.rank]), expected)
        assert checkpointer.slots.used == 0

    sim.run(2, fn)


def test_a_slot_that_is_used_again_before_the_weight_pass():
    """What the weight pass holds is not what the next micro-batch overwrites."""

    def gradients(call):
        layer, x = nn.Linear(WIDTH, WIDTH, bias=False), batches()
        with torch.no_grad():
            layer.weight.copy_(torch.eye(WIDTH))
        backlog, undo = split_grads.Backlog(), split_grads.split(layer)
        for part in x:
            with split_grads.put_off(backlog):
                call(layer, part).square().sum().backward()
        backlog.work_off(deliver)
        undo()
        return [layer.weight.grad]

    checkpointing.configure(None, None, True, True, 1)
    same_bits(gradients(checkpoint), gradients(lambda fn, *args: fn(*args)))


def test_gradients_that_arrive_in_pieces():
    """A stage hands gradients of its outputs to backward itself; two outputs, one of which needs none."""
    layer = model()[0]

    def stage(call):
        torch.manual_seed(3)
        x = batches()[0]
        layer.zero_grad(set_to_none=True)
        h, ids = call(lambda a: (layer(a), a.argmax(-1)), x)
        assert not ids.requires_grad
        torch.autograd.backward((h, h * 2), (torch.ones_like(h), torch.full_like(h, 0.5)))
        return [x.grad, *(p.grad for p in layer.parameters())]

    same_bits(stage(checkpoint), stage(lambda fn, *args: fn(*args)))
