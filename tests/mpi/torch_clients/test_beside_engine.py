"""An engine and torch's default group in one process: verbs of both between forward, backward and step."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.torch_groups import default_group
from tests.zoo.models import samples
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)


def train(stage, *, with_verbs, steps=3):
    """Losses, weights and, if asked for, what torch's verbs gave."""
    engine = start(config(stage, **ADAM))
    rank, size = dist.get_rank(), dist.get_world_size()
    losses, sums, works = [], [], []

    def verbs(loss):
        if not with_verbs:
            return
        now, later = loss.detach().double().clone(), torch.full((300,), float(rank + len(works)))
        works.append((later, dist.all_reduce(later, async_op=True)))
        dist.all_reduce(now)
        dist.broadcast(torch.ones(3), len(works) % size)
        sums.append(now / size)

    for batch in samples(steps):
        loss = engine(*own_part(engine, batch))
        verbs(loss)
        engine.backward(loss)
        verbs(loss)
        engine.step()
        verbs(loss)
        losses.append(loss.detach().double())
    for number, (later, work) in enumerate(works):
        work.wait()
        assert torch.equal(later, torch.full((300,), float(sum(range(size)) + size * number)))
    return torch.stack(losses), weights(engine), sums


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_side_by_side(world, stage):
    with default_group(world, "mpi4py"):
        losses, trained, sums = train(stage, with_verbs=True)
        plain_losses, plain_weights, _ = train(stage, with_verbs=False)
        mean = losses.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(losses, plain_losses)
    for name, weight in plain_weights.items():
        assert torch.equal(trained[name], weight), name
    torch.testing.assert_close(torch.stack(sums[::3]), mean)
