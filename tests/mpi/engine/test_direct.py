"""`loss.backward()` in place of `engine.backward(loss)`, over one engine and several; updates without one."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import UsageError
from tests.zoo import same_bits
from tests.zoo.models import BATCH, samples
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
STEPS = 3


def run(engine, backward, steps=STEPS, factor=1.0):
    """Steps in which `backward` is given the engine and the loss of each micro-batch."""
    losses = []
    for batch in samples(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*own_part(engine, batch, micro))
            losses.append(float(loss.detach()))
            backward(engine, loss * factor)
            engine.step()
    assert engine.global_steps == steps
    return losses


def by_engine(engine, loss):
    engine.backward(loss)


def by_script(engine, loss):
    del engine
    loss.backward()


def by_script_in_parts(engine, loss):
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    engine._backward_epilogue()  # of scripts for DeepSpeed


@STAGES
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="fp32"),
        # two micro-batches, whose halves have the same digits, do not divide the batch among 4 ranks
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulated", marks=pytest.mark.ranks(1, 2, 3)),
        pytest.param({"bf16": {"enabled": True}}, id="bf16"),
        pytest.param({"gradient_clipping": 0.1}, id="clipped"),
    ],
)
def test_plain_backward_is_that_of_the_engine(stage, more):
    steps = more.get("gradient_accumulation_steps", 1)
    settings = config(stage, **ADAM, **{**more, "train_batch_size": BATCH})
    one, other = start(settings), start(settings)
    assert run(one, by_engine) == run(other, by_script)  # half a loss and half a gradient have the same digits
    same_bits(weights(other), weights(one))
    assert other.get_global_grad_norm() == one.get_global_grad_norm()
    assert other.micro_steps == STEPS * steps
    one.destroy()
    other.destroy()


@STAGES
def test_passes_of_one_step_add_up(stage):
    one, other = start(config(stage, **ADAM)), start(config(stage, **ADAM))
    run(one, by_engine)
    run(other, by_script_in_parts)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-5, atol=1e-6)
    one.destroy()
    other.destroy()


@STAGES
def test_fp16_needs_the_scale_of_the_engine(stage):
    settings = config(stage, **ADAM, fp16={"enabled": True, "initial_scale_power": 8})
    one, other = start(settings), start(settings)
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        run(other, by_script, steps=1)
    assert other.global_steps == 0
    assert run(one, by_engine) == run(other, lambda engine, loss: engine.scale(loss).backward())
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


def joint(first, second, steps=STEPS):
    """Steps on the sum of two engines' losses, in one backward pass."""
    for batch in samples(steps):
        loss = first(*own_part(first, batch)) + 0.5 * second(*own_part(second, batch))
        loss.backward()
        for engine in (first, second):
            engine._backward_epilogue()
            engine.step()


@pytest.mark.deepspeed_row("a3")
@pytest.mark.parametrize(
    ("left", "right", "dtype"), [(0, 0, "fp32"), (1, 2, "fp32"), (3, 3, "fp32"), (2, 3, "fp32"), (1, 2, "bf16")]
)
def test_engines_that_share_a_loss_train_as_each_alone(left, right, dtype):
    together = [start(config(stage, dtype=dtype, **ADAM)) for stage in (left, right)]
    joint(*together)
    alone = [start(config(stage, dtype=dtype, **ADAM)) for stage in (left, right)]
    run(alone[0], by_engine)
    run(alone[1], by_engine, factor=0.5)
    for one, other in zip(together, alone, strict=True):
        same_bits(weights(one), weights(other))
        assert one.global_steps == STEPS
    for engine in (*together, *alone):
        engine.destroy()


def test_a_loss_that_another_engine_scaled_is_refused():
    first = start(config(0, **ADAM, fp16={"enabled": True, "loss_scale": 64}))
    second = start(config(0, **ADAM, bf16={"enabled": True}))
    batch = samples(1)[0]
    loss = first(*own_part(first, batch)).float() + second(*own_part(second, batch)).float()
    with pytest.raises(UsageError, match="another engine multiplied by its loss scale, 64"):
        first.backward(loss)
    for engine in (first, second):
        engine.destroy()


class Recomputed(nn.Module):
    """All of its layers are computed again in backward, in a pass of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, y):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=True)
        return (x.sum(-1) - y.sum(-1)).square().mean()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_pass_with_reentrant_checkpoints_is_one_pass(stage):
    settings = config(stage, **ADAM, gradient_accumulation_steps=2)
    one, other = start(settings, Recomputed()), start(settings, Recomputed())
    run(one, by_engine)
    run(other, by_script)
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


class Breaks(torch.autograd.Function):
    """Nothing in forward, an error in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("broken")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_pass_that_breaks_off_is_forgotten(stage):
    engine = start(config(stage, **ADAM))
    batch = own_part(engine, samples(1)[0])
    handle = engine.module.first.register_forward_hook(lambda *args: Breaks.apply(args[2]))
    with pytest.raises(ArithmeticError):
        engine(*batch).backward()
    handle.remove()
    with pytest.raises(UsageError, match="without any backward pass"):
        engine.step()
    engine.zero_grad()
    run(engine, by_script)
    engine.destroy()


@STAGES
def test_an_update_without_a_backward_pass_is_refused(stage):
    engine = start(config(stage, **ADAM, scheduler={"type": "WarmupLR", "params": {}}))
    before, lr = weights(engine), engine.get_lr()
    engine(*own_part(engine, samples(1)[0]))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"without any backward pass.*call engine\.backward\(loss\) before"):
            engine.step()
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    assert engine.get_lr() == lr
    same_bits(weights(engine), before)
    run(engine, by_engine)
    with pytest.raises(UsageError, match="without any backward pass"):
        engine.step()
    assert engine.global_steps == STEPS
    engine.destroy()


@pytest.mark.ranks(1, 3)
def test_fewer_passes_than_micro_batches_are_told_once(caplog):
    engine = start(config(1, **ADAM, gradient_accumulation_steps=2))
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    for _ in range(2):
        engine.backward(engine(*own_part(engine, samples(1)[0])))
        engine.step()
        engine.step()
    logger.removeHandler(caplog.handler)
    assert engine.global_steps == 2
    told = [record.getMessage() for record in caplog.records if "count as zeros" in record.getMessage()]
    assert told == [
        "1 backward passes for 2 micro-batches of an update; the gradients of the others count as zeros in the mean"
    ]
    engine.destroy()


@pytest.mark.ranks(1, 3)
def test_sums_are_completed_when_asked_for():
    one, other = start(config(1, **ADAM)), start(config(1, **ADAM))
    run(one, by_engine)

    def backward(engine, loss):
        with engine.no_sync():
            loss.backward()
        engine.allreduce_gradients()

    run(other, backward)
    same_bits(weights(other), weights(one))
    one.destroy()
    other.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("starts", ["the script", "the first engine"])
def test_a_loss_that_is_shared_is_divided_once_by_the_accumulation_steps(starts):
    settings = [config(stage, **ADAM, gradient_accumulation_steps=2, reduction="ordered") for stage in (1, 3)]
    engines, alone = [start(one) for one in settings], [start(one) for one in settings]
    for micro in range(2):
        batch = own_part(engines[0], samples(1)[0], micro)
        loss = sum(engine(*batch) for engine in engines)
        if starts == "the script":
            loss.backward()
        else:
            engines[0].backward(loss)
        for engine in alone:
            engine.backward(engine(*batch))
        for engine in (*engines, *alone):
            engine.step()
    for one, other in zip(engines, alone, strict=True):
        assert one.get_global_grad_norm() == other.get_global_grad_norm() > 0
        same_bits(weights(one), weights(other))
    for engine in (*engines, *alone):
        engine.destroy()


@pytest.mark.ranks(2, 3)
def test_a_rank_without_data_is_told_of_once_and_nobody_waits(caplog):
    engine = start(config(1, **ADAM))
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    for batch in samples(2):
        if engine.global_rank:
            engine.backward(engine(*own_part(engine, batch)))
        engine.step()
    logger.removeHandler(caplog.handler)
    told = [record.getMessage() for record in caplog.records if "ran no backward pass" in record.getMessage()]
    engine.destroy()
    assert engine.global_steps == 2
    expected = [f"1 of {engine.world_size} ranks"] if engine.global_rank == 0 else []
    assert [text.split(" ran no")[0] for text in told] == expected


@pytest.mark.ranks(1, 3)
def test_a_pass_that_was_broken_off_leaves_nothing_to_the_next():
    """An exception within engine.backward, then direct passes: as if there had been none."""
    norms = []
    for breaks in (False, True):
        engine = start(config(**ADAM, gradient_accumulation_steps=2, train_batch_size=BATCH))
        (batch,) = samples(1)
        if breaks:
            handle = engine.module.norm.register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(engine(*own_part(engine, batch)))
            handle.remove()
            engine.zero_grad()
        for micro in range(2):
            engine(*own_part(engine, batch, micro)).backward()
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
