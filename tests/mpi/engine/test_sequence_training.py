"""Engines whose sequences are cut over ranks train as one process does: losses, all gradients, and weights."""

import pytest
import torch

from mpispeed.zero import safe_get_full_grad
from tests.helpers.sequence_model import data, model
from tests.zoo.training import WARM, config, start

ROWS = 12
BOUND = 1e-5  # fp32 sums in another order, over 13 tokens and 12 rows; seen: 1e-6


def settings(stage, size, ring, accumulation, **more):
    section = {"sequence_parallel_size": size, "sequence_parallel": {"ring_size": ring}}
    return config(stage, ROWS, accumulation, **(WARM | {"scheduler": {}}), **section, **more)


def shares(batch, index, count):
    rows = ROWS // count
    return {name: tensor[index * rows : (index + 1) * rows] for name, tensor in batch.items()}


def trained(engine, batches):
    """Losses over all ranks, and gradients before the norm is clipped, of every step."""
    mesh, accumulation = engine.mpispeed.parts.mesh, engine.gradient_accumulation_steps()
    losses, grads = [], []
    for batch in batches:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(accumulation):
            place = micro * mesh["batch"].size + mesh["batch"].rank
            loss = engine(**shares(batch, place, accumulation * mesh["batch"].size))
            told = mesh["sequence"].gather_objects(loss.item())
            assert told == [told[0]] * len(told)  # all ranks of a sequence know its loss
            total += engine.backward(loss).detach()
            if micro == accumulation - 1:
                grads.append({name: safe_get_full_grad(each) for name, each in engine.module.named_parameters()})
            engine.step()
        mesh["data"].all_reduce(total, "avg")
        losses.append(float(total))
    return losses, grads


def plain(batches, count, **options):
    """The same by one process with torch's attention; each of `count` parts of a batch has a mean of its own."""
    net = model(**options)
    net.is_reference = True
    optimizer = torch.optim.AdamW(net.parameters(), **WARM["optimizer"]["params"])
    losses, grads = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = torch.stack([net(**shares(batch, index, count)) for index in range(count)]).mean()
        loss.backward()
        losses.append(loss.item())
        grads.append({name: each.grad.clone() for name, each in net.named_parameters()})
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return losses, grads


def close(found, expected):
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= BOUND * max(1e-2, float(value.abs().max())), name


CASES = [
    (1, 1, 1, 2, 2, "padding"),
    (2, 2, 1, 0, 1, "packed"),
    (2, 2, 2, 3, 2, "plain"),
    (3, 3, 1, 1, 1, "padding"),
    (3, 3, 3, 3, 2, "packed"),
    (4, 4, 2, 3, 1, "packed"),
    (4, 4, 4, 2, 1, "padding"),
    (4, 2, 1, 3, 3, "padding"),
    (4, 2, 2, 1, 1, "packed"),
    (4, 4, 1, 0, 1, "plain"),
]


@pytest.mark.parametrize(
    ("size", "ring", "stage", "accumulation", "kind"),
    [pytest.param(*case, marks=pytest.mark.ranks(ranks)) for ranks, *case in CASES],
)
def test_a_cut_sequence_trains_as_a_whole_one(size, ring, stage, accumulation, kind):
    is_causal, batches = kind != "padding", data(kind, ROWS)
    engine = start(settings(stage, size, ring, accumulation), model(is_causal=is_causal))
    losses, grads = trained(engine, batches)
    count = accumulation * engine.mpispeed.parts.mesh["batch"].size
    engine.destroy()
    expected, own = plain(batches, count, is_causal=is_causal)
    for step, loss in enumerate(expected):
        assert abs(losses[step] - loss) <= BOUND * loss, step
        close(grads[step], own[step])
