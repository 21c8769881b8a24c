"""Modules fetched as one: ranks that take different experts, or none, train as with whole parameters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpispeed.comm as dist
from mpispeed.sharding.leaf import set_z3_leaf_modules
from tests.zoo.cut import WIDTH, check_like_whole, difference, one_step, own_batches, run
from tests.zoo.models import built
from tests.zoo.training import ORDERED, config, start

pytestmark = [pytest.mark.mpi(min_size=2)]


class Expert(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Experts(nn.Module):
    """Adds up what those experts give that `takes` names."""

    def __init__(self, takes, nested=False):
        super().__init__()
        self.experts = nn.ModuleList(Experts(takes) if nested and i == 0 else Expert() for i in range(3))
        self.takes = takes

    def forward(self, hidden):
        out = torch.zeros_like(hidden)
        for index in self.takes(hidden):
            out = out + self.experts[index](hidden) / (index + 1)
        return out


class Passing(Experts):
    """Without an expert the input itself comes out."""

    def forward(self, hidden):
        return super().forward(hidden) if self.takes(hidden) else hidden


class Model(nn.Module):
    """Experts before, between and after other layers; the first ones get inputs that need no gradient."""

    def __init__(self, make, recompute=None):
        super().__init__()
        self.first, self.left, self.middle = make(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.last, self.recompute = make(), nn.Linear(WIDTH, WIDTH), recompute
        self.is_passed = isinstance(self.between, Passing)

    def called(self, module, x):
        if self.recompute is None or (self.recompute == "reentrant" and not x.requires_grad):
            return module(hidden=x)
        return checkpoint(module, x, use_reentrant=self.recompute == "reentrant")

    def forward(self, x):
        x = self.middle(self.called(self.first, x) + x)
        side = self.left(x)  # beside the experts: whose turn comes first in backward depends on the order in forward
        mixed = self.called(self.between, x)
        return self.last((torch.relu(mixed) if self.is_passed else torch.relu_(mixed)) + side + x)


def by_rank(_):
    """Each rank another expert, the last one none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return [] if rank == size - 1 else [rank % 3]


def by_values(hidden):
    """What the data ask for: up to all of them, or none."""
    bits = int(hidden.detach().abs().sum() * 97)
    return [index for index in range(3) if bits >> index & 1]


def marked(make, recompute=None):
    """A model whose experts are leaves."""
    model = Model(make, recompute)
    set_z3_leaf_modules(model, [type(model.first)])
    return model


ROUTES = pytest.mark.parametrize("takes", [by_rank, by_values])


@pytest.mark.deepspeed_row("a1")
@ROUTES
@pytest.mark.parametrize("recompute", [None, "kept graph"])
def test_ranks_take_different_experts(takes, recompute):
    check_like_whole(lambda: marked(lambda: Experts(takes), recompute))


@ROUTES
@pytest.mark.parametrize("recompute", [None, "reentrant"])
def test_without_an_expert_the_input_itself_comes_out(takes, recompute):
    check_like_whole(lambda: marked(lambda: Passing(takes), recompute))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("recompute", [None, "kept graph"])
def test_leaves_inside_of_leaves(recompute):
    check_like_whole(lambda: marked(lambda: Experts(by_rank, nested=True), recompute))


@pytest.mark.ranks(2, 3)
def test_gradients_accumulate():
    def drive(engine, batch, step):
        losses = []
        for part in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            losses.append(one_step(engine, part, step))
        return losses[-1]

    check_like_whole(lambda: marked(lambda: Experts(by_values)), drive, like=2, gradient_accumulation_steps=2)


@pytest.mark.ranks(2)
def test_small_parameters_of_a_leaf_stay_whole():
    def losses(stage, threshold):
        zero = {"stage3_param_persistence_threshold": threshold}
        engine = start(config(stage, **ORDERED, reuse=0, zero=zero), built(lambda: marked(lambda: Experts(by_rank))))
        found = [one_step(engine, batch, 0) for batch in own_batches(engine, 3)]
        engine.destroy()
        return found

    reference = losses(0, 0)
    for threshold in (60, 10**6):  # the layers beside the leaves, everything
        assert losses(3, threshold) == reference


@pytest.mark.ranks(2)
def test_two_passes_over_one_graph_and_gradients_of_inputs():
    def drive(engine, batch, step):
        x = batch[0].clone().requires_grad_()
        loss = difference(engine(x), batch[1])
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss * 0.5)
        engine.step()
        return float(loss.detach()) + float(grad.sum())

    check_like_whole(lambda: marked(lambda: Experts(by_rank)), drive)


@pytest.mark.ranks(3)
def test_leaves_leave_one_after_the_other():
    """Not all experts of a model are whole at once in backward."""

    def make():
        layers = nn.Sequential(*(Experts(by_rank) for _ in range(4)))
        set_z3_leaf_modules(layers, [Experts])
        return layers

    ours = run(make, config(3, **ORDERED, reuse=0, zero={"overlap_comm": False}))
    padded = 768  # of each leaf: 369 elements, in blocks of 256 for 3 ranks
    assert ours.tally.peak_elements == 2 * padded
