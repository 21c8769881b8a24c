"""Habits of PyTorch at every stage: they train as plain torch does on one process, or end with a sentence.

More of stage 3 is in `sharding/test_shapes_autograd.py`.
"""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations

from mpispeed.base.errors import UsageError
from tests.helpers.covering import on_ranks
from tests.zoo.cut import WIDTH, difference
from tests.zoo.models import BATCH, Stack, built
from tests.zoo.training import ADAM, config, start, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 3)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def two_losses_of_one_forward(model, x, y, _):
    out = model(x)
    difference(out, y).backward(retain_graph=True)
    out.square().mean().backward()


def two_forwards_then_two_backwards(model, x, y, _):
    losses = [difference(model(x * factor), y) for factor in (1.0, 0.5)]
    for loss in losses:
        loss.backward()


def several_tensors_at_once(model, x, y, _):
    out = model(x)
    torch.autograd.backward([difference(out, y), out.square().mean()])


def a_gradient_of_the_output(model, x, y, _):
    out = model(x)
    out.backward(gradient=(out.detach() - y) / out.numel())


def a_penalty_of_gradients(model, x, y, _):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
    (difference(out, y) + (x.shape[0] * slope).square().mean()).backward()


def gradients_of_inputs(model, x, y, _):
    x = x.clone().requires_grad_()
    difference(model(x), y).backward()
    assert x.grad is not None
    assert float(x.grad.abs().sum()) > 0


def hooks_of_tensors_and_parameters(model, x, y, module):
    handle = module.last.weight.register_hook(lambda grad: grad * 0.5)
    out = model(x)
    out.register_hook(lambda grad: grad * 3)
    difference(out, y).backward()
    handle.remove()


def evaluation_between(model, x, y, _):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(x)
    difference(model(x), y).backward()


HABITS = [
    two_losses_of_one_forward, two_forwards_then_two_backwards, several_tensors_at_once, a_gradient_of_the_output,
    a_penalty_of_gradients, gradients_of_inputs, hooks_of_tensors_and_parameters, evaluation_between,
]  # fmt: skip


def batches(steps=2):
    x = torch.randn(steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    return [(part, part.sin()) for part in x]


def plainly(make, habit):
    model = built(make)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        habit(model, x, y, model)
        optimizer.step()
    return model


def check(make, habit, stage):
    engine, reference = start(config(stage, BATCH, **ADAM), built(make)), plainly(make, habit)
    count = BATCH // engine.world_size
    rows = slice(engine.global_rank * count, (engine.global_rank + 1) * count)
    for x, y in batches():
        habit(engine, x[rows], y[rows], engine.module)
        engine.step()
    theirs = dict(reference.named_parameters())
    for name, ours in weights(engine).items():
        # Sums in another order; Adam divides small gradients by small roots.
        torch.testing.assert_close(ours, theirs[name], rtol=1e-3, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}")
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "habit"),
    on_ranks([0, 1, 2, 3], HABITS, ranks=(1, 2, 3)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_trains_as_plain_torch(stage, habit):
    check(Stack, habit, stage)


def with_norm():
    model = Stack(1)
    parametrizations.weight_norm(model.last)
    return model


@STAGES
@pytest.mark.ranks(2)
def test_parametrizations(stage):
    check(with_norm, evaluation_between, stage)


@STAGES
@pytest.mark.ranks(2)
def test_a_vector_given_to_engine_backward_ends_with_advice(stage):
    engine = start(config(stage, BATCH, **ADAM), built(Stack))
    with pytest.raises(UsageError, match=r"needs one scalar loss.*call its own backward\(gradient\)"):
        engine.backward(engine(torch.ones(2, WIDTH)))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.ranks(2)
def test_torch_func_over_whole_parameters(stage):
    engine = start(config(stage, BATCH, **ADAM), built(Stack))
    x, model = torch.ones(2, WIDTH), built(Stack)

    def slopes(module):
        values = {name: param.detach() for name, param in module.named_parameters()}
        return torch.func.grad(lambda given: torch.func.functional_call(module, given, (x,)).square().sum())(values)

    for name, found in slopes(engine.module).items():
        torch.testing.assert_close(found, slopes(model)[name])
    each = torch.func.vmap(engine.module)(x[:, None])[:, 0]
    torch.testing.assert_close(each, model(x))
    engine.destroy()


@STAGES
@pytest.mark.ranks(2)
def test_a_copy_of_the_model(stage):
    engine = start(config(stage, BATCH, **ADAM), built(Stack))
    if stage == 3:
        with pytest.raises(UsageError, match=r"copy\.deepcopy reads a parameter whose data are cut"):
            copy.deepcopy(engine.module)
    else:
        twin, x = copy.deepcopy(engine.module), torch.ones(2, WIDTH)
        assert torch.equal(twin(x), engine(x))
        assert not any(one is other for one, other in zip(twin.parameters(), engine.module.parameters(), strict=True))
    engine.destroy()
