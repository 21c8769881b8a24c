"""The fused transformer layer in an engine: parameters whole and cut train as one process does."""

import pytest

import mpispeed
from mpispeed.nn.block import TransformerConfig, TransformerLayer
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, train_warm

pytestmark = pytest.mark.mpi

# fp32 sums in another order, through three steps of Adam that move.
TOLERANCE = 2e-5


def model(**changes):
    """Two fused layers between an embedding and a head."""
    given = {"hidden_size": 24, "heads": 3, "num_hidden_layers": 2, "initializer_range": 0.02}
    made = TransformerConfig(**given, attention="explicit", **changes)
    return TinyLM(24, 2, is_tied=False, block=lambda width: TransformerLayer(made))


@pytest.mark.parametrize(("stage", "is_pre"), [(0, False), (3, True), (3, False)])
def test_training_is_that_of_one_process(world, stage, is_pre):
    # At stage 3 one of the two models is cut as it is made.
    changes = {"pre_layer_norm": is_pre, "gelu_checkpoint": True, "attn_dropout_checkpoint": True}
    size = 2 * world.size
    data = batches(1, size) * 5  # the schedule begins with two steps of rate 0
    settings = config(stage, size, 1, **WARM)
    with mpispeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3 and is_pre):
        cut = model(**changes)
    engine = start(settings, cut)
    got = train_averaged(engine, data)
    want = train_warm(model(**changes), data)
    assert got == pytest.approx(want, abs=TOLERANCE)
    assert want[-1] < want[0]
