"""Eigenvalues of the layers of a pipeline: those of dense Hessians of the model as a whole."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.pipe import PipelineModule
from tests.helpers.hessians import WIDTH, Attended, Single, batch, dense
from tests.zoo import same_bits
from tests.zoo.models import Residual, built
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

SECTION = {"enabled": True, "layer_name": "^residual$", "max_iter": 300, "tol": 1e-5}
FEW = {"max_iter": 3}


def layers(*more):
    return built(
        lambda: [nn.Linear(WIDTH, WIDTH), *(Residual(WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH), *more]
    )


def started(world, made, zero=0, chunks=1, schedule="1f1b", eigenvalue=None, **more):
    """An engine of one to three stages, or of two by two ranks."""
    stages = 2 if world.size == 4 else world.size
    model = PipelineModule(made, num_stages=stages, num_chunks=chunks, loss_fn=nn.functional.mse_loss)
    given = config(zero, 12, 2, **ADAM, eigenvalue=SECTION | (eigenvalue or {}), reduction="ordered", **more)
    return start(given | {"pipeline": {"schedule": schedule}}, model)


def train(engine, data):
    for each in data:
        engine.train_batch(iter([own_part(engine, each, micro) for micro in range(2)]))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", [(0, 1, "1f1b"), (1, 1, "zb-h1"), (3, 1, "gpipe"), (1, 2, "interleaved")], ids=str)
def test_they_are_those_of_dense_hessians(case, world):
    """Of the last micro-batch."""
    zero, chunks, schedule = case
    if chunks > 1 and world.size in (1, 3):
        schedule, chunks = "1f1b", 1  # one stage has no chunks, and five layers are few for six
    plain = nn.Sequential(*layers())
    x, y = (part[6:] for part in batch(12))
    wanted = []
    for block in plain[1:4]:
        values = torch.linalg.eigvalsh(dense(nn.functional.mse_loss(plain(x), y), list(block.parameters())).double())
        wanted.append(float(values[values.abs().argmax()]))
    engine = started(world, layers(), zero, chunks, schedule)
    train(engine, [batch(12)])
    assert engine.eigenvalues.latest == pytest.approx(wanted, rel=1e-3)
    assert [engine.eigenvalues.curvature_of(f"{n}.up.weight") for n in range(5)] == [
        None,
        *engine.eigenvalues.values,
        None,
    ]
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_training_keeps_its_bits(world):
    """Also random numbers, and buffers that a forward pass changes."""
    outcomes = []
    for is_on in (False, True):
        more = nn.Dropout(0.3), built(lambda: nn.BatchNorm1d(WIDTH))
        torch.manual_seed(4)
        engine = started(world, layers(*more), eigenvalue=FEW | {"enabled": is_on})
        train(engine, [batch(12, seed) for seed in range(3)])
        outcomes.append(weights(engine) | {name: each.clone() for name, each in engine.module.named_buffers()})
        engine.destroy()
    same_bits(*outcomes)


@pytest.mark.ranks(1, 2)
def test_fused_attention_is_computed_otherwise_for_them(world):
    engine = started(world, [*layers(), Attended()], eigenvalue=FEW)
    train(engine, [batch(12)])
    assert len(engine.eigenvalues.latest) == 3
    assert all(engine.eigenvalues.latest)
    engine.destroy()


@pytest.mark.ranks(1, 2, 3)
def test_an_operator_without_second_derivative_ends_in_a_sentence_on_all_stages(world):
    engine = started(world, [*layers(), Single()], eigenvalue=FEW)
    with pytest.raises(UsageError, match="does not have"):
        train(engine, [batch(12)])
    engine.destroy()


def test_classes_that_are_not_there_are_refused_at_the_start(world):
    with pytest.raises(ConfigError, match="classes: Linear, Residual"):
        started(world, layers(), eigenvalue={"layer_name": "bert.encoder.layer"})
