"""No stage holds more activations at once than its schedule says: counted, and measured on what autograd keeps."""

import weakref

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.pipe import LayerSpec, PipelineModule
from mpispeed.pipe.check import check
from mpispeed.pipe.schedule import build
from tests.helpers.covering import on_ranks

pytestmark = pytest.mark.mpi(min_size=1)
WIDTH, ROWS = 8, 2
KEPT = weakref.WeakSet()


class Activation:
    """What the backward pass of one micro-batch through one layer needs."""

    def __init__(self, tensor):
        self.tensor = tensor


class Keep(torch.autograd.Function):
    """Doubles its input, and keeps it as any layer keeps what its backward pass needs."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = Activation(x)
        KEPT.add(ctx.kept)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Layer(nn.Module):
    """Linear, with a count of what is kept of it at its busiest."""

    most = most_bytes = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = Keep.apply(self.linear(x))
        Layer.most = max(Layer.most, len(KEPT))
        Layer.most_bytes = max(Layer.most_bytes, sum(one.tensor.nbytes for one in KEPT))
        return x


@pytest.mark.parametrize(("schedule", "micro_batches"), on_ranks(["1f1b", "gpipe", "interleaved", "zb-h1"], [1, 3, 8]))
def test_live_activations_are_those_of_the_table(schedule, micro_batches, world):
    stages = world.size
    chunks = 2 if schedule == "interleaved" and stages > 1 else 1
    schedule = schedule if chunks > 1 or schedule != "interleaved" else "1f1b"
    layers = [LayerSpec(Layer) for _ in range(stages * chunks)]  # one in each virtual stage
    model = PipelineModule(
        layers, num_stages=stages, num_chunks=chunks, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    settings = {
        "train_batch_size": ROWS * micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": schedule},
    }
    engine = mpispeed.initialize(model=model, config=settings)[0]
    proof = check([build(schedule, micro_batches, stages, stage, chunks) for stage in range(stages)])
    own = proof.stages[engine.stage_id]
    for _ in range(2):
        Layer.most = Layer.most_bytes = 0
        x = torch.ones(ROWS, WIDTH)
        engine.train_batch(iter([(x, x)] * micro_batches))
        assert engine._executor.peak_live == own.peak_live <= own.buffers
        assert Layer.most == own.peak_live
        assert Layer.most_bytes == own.peak_live * x.nbytes
        assert len(KEPT) == 0
    engine.destroy()
