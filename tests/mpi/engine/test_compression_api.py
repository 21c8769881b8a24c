"""`init_compression` on stages of a pipeline: each compresses its own layers, and all refuse alike."""

import logging

import pytest
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.compression import init_compression, student_initialization
from mpispeed.nn.compression import compression_of
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.helpers.compression import SHAPE, bits
from tests.helpers.pipes import gpt_layers
from tests.zoo.training import ADAM, config, start

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


@pytest.mark.ranks(1, 2)
def test_layers_that_no_teacher_gave_are_told_of_once(world, caplog):
    """`initialize` has no teacher; also where the student's layers go into a pipeline afterwards."""
    section = {"enabled": True, "module_name_prefix": "0", "teacher_layer": [1]}
    settings = config(1, 4, world.size, **ADAM, compression_training={"layer_reduction": section})
    teacher = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    student = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    for is_copied in (False, True):
        if is_copied:
            student_initialization(student, teacher, settings)
        layers = [student[0][0], nn.Linear(4, 4)]
        model = PipelineModule(layers, num_stages=world.size, loss_fn=nn.functional.mse_loss)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="mpispeed"):
            start(settings, model).destroy()
        said = [each for each in caplog.records if "no layer of the model was copied" in each.getMessage()]
        assert len(said) == (world.rank == 0 and not is_copied)
