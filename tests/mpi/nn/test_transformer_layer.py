"""The fused transformer layer in an engine: parameters whole and cut train as one process does."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from tests.helpers.training import VOCABULARY, batches, config, train_engine, train_plain

pytestmark = pytest.mark.mpi

# fp32 sums in another order, through three steps of Adam that move.
TOLERANCE = 2e-5


class Model(nn.Module):
    """Two fused layers between an embedding and a head, as in BERT; returns the mean loss."""

    def __init__(self, **changes):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            given = {"hidden_size": 24, "heads": 3, "num_hidden_layers": 2, "initializer_range": 0.02}
            made = TransformerConfig(**given, attention="explicit", **changes)
            self.embed = nn.Embedding(VOCABULARY, 24)
            self.layers = nn.ModuleList(TransformerLayer(made) for _ in range(2))
            self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


@pytest.mark.parametrize(("stage", "is_pre"), [(0, False), (3, True), (3, False)])
def test_training_is_that_of_one_process(world, stage, is_pre):
    # At stage 3 one of the two models is cut as it is made.
    changes = {"pre_layer_norm": is_pre, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}
    size = 2 * world.size
    data = batches(1, size) * 5  # the schedule begins with two steps of rate 0
    settings = config(stage, size, 1)
    with mpispeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3 and is_pre):
        model = Model(**changes)
    engine = mpispeed.initialize(model=model, config=settings)[0]
    got = train_engine(engine, data)
    want = train_plain(Model(**changes), data)
    assert got == pytest.approx(want, abs=TOLERANCE)
    assert want[-1] < want[0]
