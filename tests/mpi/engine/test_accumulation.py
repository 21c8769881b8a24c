"""Where a global batch ends: counting, by hand, no_sync, changed sizes, micro-batches that are given up."""

import pytest
import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from tests.zoo import same_bits
from tests.zoo.models import Net, samples
from tests.zoo.training import ADAM, SGD, check_equal, config, own_part, start, train, train_plain, weights

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 3)]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


def accumulating(steps, size):
    return {"train_batch_size": 4 * steps * size, "gradient_accumulation_steps": steps}


@STAGES
def test_boundaries_counters_and_the_returned_loss(stage, comm):
    engine = start(config(stage, **ADAM) | accumulating(3, comm.size))
    seen = []
    batch = samples(1, 4)[0]
    for micro in range(6):
        loss = engine(*batch)
        is_boundary = engine.is_gradient_accumulation_boundary()
        returned = engine.backward(loss)
        assert returned.item() == pytest.approx(loss.item() / 3)
        assert engine.is_gradient_accumulation_boundary() == is_boundary
        engine.step()
        assert engine.was_step_applied() == is_boundary
        assert engine.micro_steps == micro + 1
        seen.append((is_boundary, engine.global_steps, engine.global_samples))
    batch_size = engine.train_batch_size()
    assert [row[0] for row in seen] == [False, False, True] * 2
    assert [row[1] for row in seen] == [0, 0, 1, 1, 1, 2]
    assert seen[-1][2] == 2 * batch_size
    assert engine.backward(engine(*batch), scale_wrt_gas=False).item() == pytest.approx(engine(*batch).item())
    engine.destroy()


@STAGES
def test_boundaries_set_by_hand(stage):
    model, plain = Net(), Net()
    engine = start(config(stage, **SGD), model)
    first, second = samples(2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*own_part(engine, first)))
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*own_part(engine, second)))
    engine.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    (plain(*first) + plain(*second)).backward()
    optimizer.step()
    check_equal(engine.module, plain)
    engine.set_gradient_accumulation_boundary(None)
    assert engine.is_gradient_accumulation_boundary()
    engine.destroy()


@STAGES
def test_a_boundary_that_is_known_only_at_the_step(stage):
    """Backward passes that were told of no boundary leave sums to be taken; without them ranks would part."""
    model, plain = Net(), Net()
    engine = start(config(stage, **SGD), model)
    batch = samples(1)[0]
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*own_part(engine, batch)))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    train_plain(plain, [batch], torch.optim.SGD(plain.parameters(), lr=1e-2))
    check_equal(engine.module, plain)
    before = weights(engine)
    with pytest.raises(UsageError, match="backward"):
        engine.step()  # none since: nothing to apply, and nothing old is applied again
    same_bits(weights(engine), before)
    engine.destroy()


@STAGES
def test_zero_grad_forgets(stage):
    model, plain = Net(), Net()
    engine = start(config(stage, **SGD), model)
    wrong, batch = samples(2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*own_part(engine, wrong)))
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(None)
    train(engine, [batch])
    train_plain(plain, [batch], torch.optim.SGD(plain.parameters(), lr=1e-2))
    check_equal(engine.module, plain)
    engine.optimizer.zero_grad()
    engine.destroy()


@STAGES
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_micro_batch_that_raises_can_be_given_up(stage, is_overlapped, comm):
    """All ranks fail at the same place in backward; after zero_grad nothing of it is left."""
    settings = config(stage, **SGD)
    settings["zero_optimization"]["overlap_comm"] = is_overlapped
    model, plain = Net(), Net()
    engine = start(settings, model)
    wrong, batch = samples(2)

    def fail(grad):
        raise ZeroDivisionError

    x, y = own_part(engine, wrong)
    hidden = torch.tanh(model.first(x))
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(nn.functional.mse_loss(model.last(model.norm(hidden)), y))
    engine.zero_grad()
    train(engine, [batch])
    train_plain(plain, [batch], torch.optim.SGD(plain.parameters(), lr=1e-2))
    check_equal(engine.module, plain)
    engine.destroy()


@STAGES
def test_batch_sizes_can_change_during_a_run(stage, comm):
    unit = 2 * comm.size
    settings = config(stage, **SGD)
    settings.update(train_batch_size=unit, train_micro_batch_size_per_gpu=2)
    engine = start(settings)
    batch = samples(1, 2)[0]

    def steps_until_boundary():
        count = 0
        while True:
            engine.backward(engine(*batch))
            is_boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            count += 1
            if is_boundary:
                return count

    assert steps_until_boundary() == 1
    engine.set_train_batch_size(3 * unit)
    assert engine.get_batch_info() == (3 * unit, 2, 3)
    assert [steps_until_boundary() for _ in range(2)] == [3, 3]
    engine.set_train_batch_size(2 * unit)  # 7 micro-batches are done: no multiple of 2
    assert [steps_until_boundary() for _ in range(2)] == [2, 2]
    assert engine.global_samples == (1 + 3 + 3 + 2 + 2) * unit
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (5 * 2 * comm.size, 5, 2)
    assert engine.train_batch_size() == 10 * comm.size
    for wrong in (unit + 1, 0, -unit):
        with pytest.raises(ValueError, match="multiple") if comm.size > 1 or wrong <= 0 else pytest.raises(ConfigError):
            engine.set_train_batch_size(wrong)
    with pytest.raises(ValueError, match="positive"):
        engine.set_train_micro_batch_size(0)
    engine.destroy()


# -- no_sync -------------------------------------------------------------------------------------------------------


def test_no_sync_is_refused_where_gradients_are_cut():
    engine = start(config(2, **ADAM))
    with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engine.no_sync():
        pass
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1])
def test_what_no_sync_does_not_allow(stage):
    engine = start(config(stage, **ADAM))
    with engine.no_sync():
        with pytest.raises(AssertionError, match="reentry is unsupported"), engine.no_sync():
            pass
        with pytest.raises(AssertionError, match="inside no_sync"):
            engine.step()
    with pytest.raises(ZeroDivisionError), engine.no_sync():
        raise ZeroDivisionError
    with engine.no_sync():  # it was left behind
        pass
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_two_no_sync_contexts_over_the_same_data_agree(stage, dtype):
    section = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}.get(dtype, {"fp16": {"enabled": True, "loss_scale": 8}})
    settings = config(stage, optimizer={"type": "Adam", "params": {"lr": 0.0}}, **section)
    engine = start(settings)
    data = samples(3)
    comm_trace = engine.mesh.comm_trace
    found = []
    for _ in range(2):
        losses = []
        comm_trace.reset()
        with engine.no_sync():
            for batch in data[:2]:
                losses.append(engine.backward(engine(*own_part(engine, batch))).item())
        assert comm_trace.total_bytes() == 0
        losses.append(engine.backward(engine(*own_part(engine, data[2]))).item())
        engine.step()
        found.append((losses, engine.get_global_grad_norm()))
        engine.zero_grad()
    assert found[0] == found[1]
    assert found[0][1] > 0
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_accumulates_without_scaling_the_loss(stage):
    model, plain = Net(), Net()
    engine = start(config(stage, **SGD), model)
    data = samples(3)
    with engine.no_sync():
        for batch in data[:2]:
            loss = engine(*own_part(engine, batch))
            assert engine.backward(loss).item() == loss.item()
    train(engine, data[2:])
    sum(plain(*batch) for batch in data).backward()
    torch.optim.SGD(plain.parameters(), lr=1e-2).step()
    check_equal(engine.module, plain)
    engine.destroy()
