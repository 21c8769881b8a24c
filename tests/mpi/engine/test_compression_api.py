"""`init_compression` on stages of a pipeline: each compresses its own layers, and all refuse alike."""

import pytest

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.compression import init_compression
from mpispeed.nn.compression import compression_of
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.helpers.compression import SHAPE, bits
from tests.helpers.pipes import gpt_layers

pytestmark = pytest.mark.mpi(min_size=1)


def pipeline():
    layers = [LayerSpec(gpt_layers.Bytes, SHAPE), *(LayerSpec(gpt_layers.PipeBlock, SHAPE),) * SHAPE.layers]
    stages = min(2, mpispeed.init_distributed().size)
    return PipelineModule(layers, num_stages=stages, loss_fn=gpt_layers.cross_entropy, seed_layers=True)


def compressed(*modules):
    model = pipeline()
    section = bits(4, 4, modules=list(modules), quantize_weight_in_forward=True)
    return init_compression(model, {"compression_training": section})


@pytest.mark.ranks(1, 2, 4)
def test_stages_compress_their_own_layers():
    """Each block is on one stage only."""
    model = compressed("1.attention", "2.attention")
    own = sorted(compression_of(model).layers)
    everyone = {name for names in model.grid.mesh["pipe"].gather_objects(own) for name in names}
    assert everyone == {f"{place}.attention.{name}" for place in (1, 2) for name in ("qkv", "out")}
    with pytest.raises(ConfigError, match="'encoder' matches no"):
        compressed("encoder")
