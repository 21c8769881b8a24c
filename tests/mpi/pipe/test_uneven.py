"""Stages of which one has something to shard or to swap and the other has nothing take part in the same collectives."""

import pytest
import torch
from torch import nn

from mpispeed.base.distinct import mark_distinct
from mpispeed.base.errors import UsageError
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.zoo import same_bits
from tests.zoo.training import config, start, weights

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.ranks(4)]
WIDTH, SMALL, BATCH, STEPS = 32, 3, 8, 2
LAST = {"small": LayerSpec(nn.Linear, WIDTH, SMALL), "empty": LayerSpec(nn.Tanh)}


def run(last, section):
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LAST[last]]
    module = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=lambda outputs, _: outputs.square().mean(),
        partition_method="uniform",
        seed_layers=True,
    )
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "gradient_clipping": 0.1}
    engine = start(config(0, BATCH, 2, reduction="ordered", **adam) | {"zero_optimization": section}, module)
    source = torch.Generator().manual_seed(engine.mesh.index("data"))
    batches = iter([(torch.randn(2, WIDTH, generator=source), torch.zeros(2)) for _ in range(2 * STEPS)])
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    found = losses, weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("last", "threshold", "kinds"),
    [
        ("small", SMALL * WIDTH, ()),
        ("empty", 0, ()),
        ("small", SMALL * WIDTH, ("param",)),
        ("empty", 0, ("optimizer",)),
    ],
    ids=str,
)
def test_training_is_that_without_sharding(last, threshold, kinds, mpi_tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(mpi_tmp_path), "buffer_count": 8}
    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    section |= {f"offload_{kind}": nvme | ({"max_in_cpu": 0} if kind == "param" else {}) for kind in kinds}
    same_bits(run(last, section), run(last, {"stage": 0}))


class Own(nn.Linear):
    """A layer of which both data ranks have values of their own."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        mark_distinct(self.parameters(), 2)


def test_all_stages_refuse_what_one_of_them_cannot_name(mpi_tmp_path):
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Own)]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out.mean(), partition_method="uniform")
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
    engine = start(config(0, BATCH, 2, **adam), module)
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(UsageError, match=r"'1\.weight' has values of its own on each"):
            save(str(mpi_tmp_path))
    engine.destroy()
