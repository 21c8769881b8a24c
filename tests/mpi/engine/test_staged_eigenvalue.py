"""Eigenvalues of the layers of a pipeline: those of dense Hessians of the model as a whole."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.expert.router import Router, RouterOptions
from mpispeed.pipe import PipelineModule, TiedLayerSpec
from tests.helpers.hessians import WIDTH, Attended, Single, batch, dense
from tests.zoo import same_bits
from tests.zoo.models import Residual, built
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

SECTION = {"enabled": True, "layer_name": "^residual$", "max_iter": 300, "tol": 1e-4}
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


def of_dense_hessians():
    """Of the last micro-batch."""
    plain, wanted = nn.Sequential(*layers()), []
    x, y = (part[6:] for part in batch(12))
    for block in plain[1:4]:
        values = torch.linalg.eigvalsh(dense(nn.functional.mse_loss(plain(x), y), list(block.parameters())).double())
        wanted.append(float(values[values.abs().argmax()]))
    return wanted


CASES = [
    pytest.param(zero, chunks, schedule, marks=pytest.mark.ranks(*ranks))
    for zero, chunks, schedule, ranks in (
        (0, 1, "1f1b", (1, 3)), (1, 1, "zb-h1", (2,)), (3, 1, "gpipe", (4,)), (1, 2, "interleaved", (2, 4)),
    )
]  # fmt: skip


@pytest.mark.parametrize(("zero", "chunks", "schedule"), CASES)
def test_they_are_those_of_dense_hessians(zero, chunks, schedule, world):
    engine = started(world, layers(), zero, chunks, schedule)
    train(engine, [batch(12)])
    assert engine.eigenvalues.latest == pytest.approx(of_dense_hessians(), rel=1e-3)
    assert [engine.eigenvalues.curvature_of(f"{n}.up.weight") for n in range(5)] == [
        None,
        *engine.eigenvalues.values,
        None,
    ]
    engine.destroy()


@pytest.mark.ranks(2)
def test_half_precision_scales_the_loss(world):
    """Values are those of the loss itself, to what fp16 holds of them."""
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 8}
    engine = started(world, layers(), eigenvalue={"tol": 1e-3}, fp16=fp16)
    train(engine, [batch(12)])
    assert engine.eigenvalues.latest == pytest.approx(of_dense_hessians(), rel=2e-2)
    engine.destroy()


class Routed(nn.Module):
    """Samples times the weights of their experts, which are balanced by what was chosen."""

    def __init__(self):
        super().__init__()
        self.gate = Router(WIDTH, 4, RouterOptions(bias_rate=0.1))

    def forward(self, x):
        return x * self.gate(x).weights


@pytest.mark.ranks(1, 2)
def test_training_keeps_its_bits(world):
    """Also random numbers, buffers that a forward pass changes, and loads of experts that it counts."""
    outcomes = []
    for is_on in (False, True):
        more = nn.Dropout(0.3), built(Routed), built(lambda: nn.BatchNorm1d(WIDTH))
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


def test_blocks_that_have_no_eigenvalues_are_refused_at_the_start(world):
    """On all ranks, also where one stage has them."""
    tied = [TiedLayerSpec("both", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    for made, name, words in (
        (layers(), "bert.encoder.layer", "classes: Linear, Residual"),
        (layers(), "*", "'\\*' is no pattern of class names: nothing to repeat"),
        (layers(nn.Tanh()), "tanh", "layer 5 .* 'tanh', has no parameter that is trained"),
        ([tied[0], *layers(), tied[1]], "linear", "layer 0 .* 'linear', is tied to another one"),
    ):
        with pytest.raises(ConfigError, match=words):
            started(world, made, eigenvalue={"layer_name": name})
