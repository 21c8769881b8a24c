"""One weight on several stages trains as one weight: it adds up all its uses, counts once, and stays equal."""

import pytest
import torch
from torch import nn

from mpispeed.pipe import PipeDataParallelTopology, PipelineModule, TiedLayerSpec
from tests.helpers.covering import on_ranks
from tests.helpers.pipes import Case, Layout, all_weights, plain, train
from tests.zoo.training import config, start

pytestmark = pytest.mark.mpi(min_size=1)
TIED = [
    Case(Layout(*sizes), schedule, stage, dtype, is_per_micro, is_tied=True)
    for sizes, schedule, stage, dtype, is_per_micro in (
        ((1, 1, 1), "1f1b", 2, "fp32", False),
        ((2, 1, 1), "zb-h1", 1, "fp32", False),
        ((2, 1, 1), "interleaved", 3, "fp32", True),
        ((1, 2, 1), "1f1b", 2, "fp32", False),
        ((1, 1, 2), "1f1b", 3, "fp32", False),
        ((3, 1, 1), "interleaved", 0, "fp32", False),
        ((3, 1, 1), "1f1b", 3, "bf16", False),
        ((2, 2, 1), "1f1b", 1, "fp32", False),
        ((2, 1, 2), "gpipe", 2, "bf16", False),
        ((2, 1, 2), "1f1b", 3, "fp32", False),
        ((4, 1, 1), "interleaved", 2, "fp32", False),
    )
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.layout.ranks)) for case in TIED]
)
def test_embedding_and_head_are_one_weight(case):
    bound = 1e-5 if case.dtype == "fp32" else 2e-3
    losses, norms = plain(4, case.dtype, is_tied=True)
    engine = case.engine()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        assert train(engine, [step]) == pytest.approx([loss], rel=bound)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=bound)
        weights = all_weights(engine)  # which are equal wherever they are
    assert "tied_modules.bytes.weight" in weights
    engine.destroy()


# -- more than two uses ----------------------------------------------------------------------------------------------

WIDTH, STEPS, MICRO_BATCHES = 5, 4, 4


class Shared(nn.Module):
    """A weight and a bias that are used several times."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) * 0.4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.bias)


def backwards(shared, x):
    return x @ shared.weight.t()


def run_all(shared, others, x):
    for index in range(4):
        x = torch.tanh(others[index](x))
        x = shared(x) if index != 1 else backwards(shared, x)
    return x


def others():
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    with torch.no_grad():
        for index, layer in enumerate(layers):
            layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(index)))
            layer.bias.zero_()
    return layers


def samples():
    generator = torch.Generator().manual_seed(9)
    return torch.randn(STEPS, 2 * MICRO_BATCHES, 2, WIDTH, generator=generator).unbind(0)


def train_whole(lr):
    shared, rest, losses = Shared(), others(), []
    params = [*shared.parameters(), *(param for layer in rest for param in layer.parameters())]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.01)
    for batch in samples():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(run_all(shared, rest, batch[:, 0]), batch[:, 1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        losses += [float(loss.detach()), float(norm)]
    return losses, shared.weight.detach()


@pytest.mark.parametrize(("schedule", "stage"), on_ranks(["1f1b", "zb-h1"], [0, 1, 2, 3]))
def test_a_weight_that_is_used_on_every_stage(schedule, stage, world):
    layers = []
    for index, linear in enumerate(others()):
        layers += [
            nn.Sequential(linear, nn.Tanh()),
            TiedLayerSpec("shared", Shared, forward_fn=backwards if index == 1 else None),
        ]
    data = 2 if world.size == 4 else 1
    topology = PipeDataParallelTopology(world.size // data, data)
    model = PipelineModule(layers, topology=topology, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    more = {"gradient_clipping": 0.05, "optimizer": adamw, "pipeline": {"schedule": schedule}}
    engine = start(config(stage, 2 * MICRO_BATCHES, MICRO_BATCHES, **more), model)
    found, own, rank = [], 2 // data, engine.mesh.index("data")
    for batch in samples():
        starts = [2 * micro + rank * own for micro in range(MICRO_BATCHES)]
        pairs = [(batch[start : start + own, 0], batch[start : start + own, 1]) for start in starts]
        is_end = engine.is_first_stage() or engine.is_last_stage()
        found += [float(engine.train_batch(iter(pairs) if is_end else None)), engine.get_global_grad_norm()]
    expected, weight = train_whole(0.01)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(all_weights(engine)["tied_modules.shared.weight"], weight, rtol=1e-5, atol=1e-6)
    engine.destroy()
