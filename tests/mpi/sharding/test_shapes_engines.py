"""Several engines in one program, and failures in the middle of a step, at stage 3."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpispeed.base.errors import ConfigError, StoreError, UsageError
from tests.zoo import same_bits
from tests.zoo.cut import check_all_cut, difference, one_step, own_batches, run
from tests.zoo.models import Stack, built
from tests.zoo.training import ORDERED, SGD, config, start, weights

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]


def test_two_engines_in_turn():
    alone = run(Stack, config(0, **ORDERED))
    first, second = start(config(3, **ORDERED), built(Stack)), start(config(3, **ORDERED, reuse=0), built(Stack))
    losses = [], []
    for step, batch in enumerate(own_batches(first, 4)):
        for engine, seen in zip((first, second), losses, strict=True):
            seen.append(one_step(engine, batch, step))
    first.destroy()
    second.destroy()
    assert losses == (alone.losses, alone.losses)
    same_bits(weights(first), alone.state)
    same_bits(weights(second), alone.state)


def distilled(stage):
    """A student learns what a frozen teacher says; both are engines, and the backward pass goes through both."""
    settings = config(stage, **ORDERED)
    del settings["optimizer"]
    guide = start(settings, built(lambda: Stack().requires_grad_(False)))
    engine = start(config(stage, **ORDERED), built(Stack))
    losses = []
    for batch in own_batches(engine, 4):
        with torch.no_grad():
            target = guide(batch[0].roll(1, 1))
        out = engine(batch[0])
        loss = difference(out, target) + 0.1 * difference(guide(out), target)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    guide.destroy()
    return losses, weights(engine)


def test_a_teacher_and_a_student_that_are_both_cut():
    reference, ours = distilled(0), distilled(3)
    assert ours[0] == reference[0]
    same_bits(ours[1], reference[1])


def test_a_model_goes_from_one_engine_to_another():
    """With plain gradient descent nothing but the weights is carried over."""
    plain = ORDERED | SGD | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    uninterrupted = run(Stack, config(0, **plain), steps=6)
    model, losses = built(Stack), []
    for part, stage in enumerate((3, 0, 3)):
        engine = start(config(stage, **plain), model)
        for step, batch in enumerate(own_batches(engine, 6)[2 * part : 2 * part + 2]):
            losses.append(one_step(engine, batch, step))
        engine.destroy()
    assert losses == uninterrupted.losses
    same_bits(weights(model), uninterrupted.state)


def test_training_after_destroy_is_ordinary_torch():
    engine = start(config(3, **ORDERED), built(Stack))
    batch = own_batches(engine, 1)[0]
    one_step(engine, batch, 0)
    engine.destroy()
    difference(engine.module(batch[0]), batch[1]).backward()
    assert all(param.grad is not None for param in engine.module.parameters())
    torch.optim.SGD(engine.module.parameters(), lr=0.1).step()


def test_a_second_engine_takes_the_model_from_the_first():
    first = start(config(3, **ORDERED), built(Stack))
    second = start(config(3, **ORDERED), first.module)
    with pytest.raises(UsageError, match="destroy"):
        first.step()
    one_step(second, own_batches(second, 1)[0], 0)
    check_all_cut(second)
    second.destroy()


# -- failures --------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As when somebody presses control and C."""


class Failing(Stack):
    """Fails in the second block, on demand: in forward, in a hook before or after it, or in backward."""

    def __init__(self):
        super().__init__()
        self.where, self.error = None, None
        self.blocks[1].register_forward_pre_hook(lambda m, a: self.trip("before"))
        self.blocks[1].register_forward_hook(lambda m, a, out: self.trip("after"))
        self.blocks[1].register_full_backward_hook(lambda m, gi, go: self.trip("backward hook"))

    def trip(self, where):
        if where == self.where:
            self.where = None
            raise self.error(where)

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        x = Trips.apply(self.blocks[1](x), self)
        self.trip("forward")
        return self.last(self.blocks[2](x)) + F.linear(x, self.first.weight)


class Trips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.model.trip("backward")
        return grad, None


PLACES = ["before", "after", "forward", "backward", "backward hook"]


@pytest.mark.parametrize("error", [ValueError, Interrupted])
@pytest.mark.parametrize("where", PLACES)
def test_training_goes_on_after_a_failure(where, error):
    def drive(engine, batch, step):
        if step in (1, 2):
            engine.module.where, engine.module.error = where, error
            with pytest.raises(error, match=where):
                engine.backward(difference(engine(batch[0]), batch[1]))
            engine.zero_grad()
        return one_step(engine, batch, step)

    reference = run(Failing, config(0, **ORDERED), drive)
    for reuse in (None, 0):
        ours = run(Failing, config(3, **ORDERED, reuse=reuse), drive)
        assert ours.losses == reference.losses
        same_bits(ours.state, reference.state)


def test_a_failure_without_gradients():
    engine = start(config(3, **ORDERED), built(Failing))
    engine.module.where, engine.module.error = "forward", ValueError
    batch = own_batches(engine, 1)[0]
    with torch.no_grad(), pytest.raises(ValueError, match="forward"):
        engine(batch[0])
    one_step(engine, batch, 0)
    check_all_cut(engine)
    engine.destroy()


def test_stepping_inside_of_forward_is_refused():
    class Steps(Stack):
        def forward(self, x):
            out = F.linear(x, self.first.weight) + super().forward(x)
            for engine in self.engines:
                engine.step()
            return out

    engine = start(config(3, **ORDERED), built(Steps))
    engine.module.engines = []
    loss = engine(own_batches(engine, 1)[0][0]).square().mean()
    engine.backward(loss)
    engine.module.engines = [engine]
    with pytest.raises(StoreError, match=r"step, load and empty_partition_cache belong outside"):
        engine(own_batches(engine, 1)[0][0])
    engine.destroy()


def test_a_model_without_parameters_is_refused_with_an_optimizer():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        start(config(3, **ORDERED), built(nn.Tanh))
