"""Gradients of `reduction` "invariant": the bits of one sum over the gradients of all micro-batches of the step."""

import copy

import pytest
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native.reduce import tree_sum
from mpispeed.zero import safe_get_full_grad
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, weights

SLOTS, SIZE = 12, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def settings(stage, dtype="fp32", **more):
    made = config(stage, SLOTS * SIZE, reduction="invariant", train_micro_batch_size_per_gpu=SIZE, **(WARM | more))
    if dtype != "fp32":
        made[dtype] = {"enabled": True} | ({"loss_scale": 64} if dtype == "fp16" else {})
    return made


def slot(batch, number):
    return batch[number * SIZE : (number + 1) * SIZE]


def mean_of_slots(model, batch, wire, loss_scale):
    """Gradients by name: computed on one process, each rounded once, one sum, one factor."""
    by_slot = []
    for number in range(SLOTS):
        model.zero_grad()
        (model(slot(batch, number)).float() * loss_scale).backward()
        by_slot.append({name: param.grad.to(wire).clone().view(-1) for name, param in model.named_parameters()})
    found = {}
    for name, param in model.named_parameters():
        out = torch.empty(param.numel())
        tree_sum(out, [one[name] for one in by_slot], scale=1 / SLOTS)
        found[name] = out.view(param.shape)
    return found


def check_gradients(engine, model, wire, steps=2, loss_scale=1.0):
    slots, rank = engine.mpispeed.parts.plan.slots, engine.mpispeed.parts.mesh.index("batch")
    for batch in batches(steps, SLOTS * SIZE):
        whole = weights(engine.module)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(whole[name])
        for step in range(slots.per_rank):
            engine.backward(engine(slot(batch, slots.slot(rank, step))))
            if step < slots.per_rank - 1:
                engine.step()
        expected = mean_of_slots(model, batch, wire, loss_scale)
        for name, param in engine.module.named_parameters():
            assert torch.equal(safe_get_full_grad(param).float(), expected[name]), name
        engine.step()


@pytest.mark.parametrize(("stage", "dtype", "overlaps"), on_ranks([0, 1, 2, 3], list(DTYPES), [False, True]))
def test_gradients_have_the_bits_of_one_sum(stage, dtype, overlaps):
    made = settings(stage, dtype)
    made["zero_optimization"]["overlap_comm"] = overlaps
    engine = start(made, TinyLM())
    model = copy.deepcopy(TinyLM()).to(DTYPES[dtype])
    check_gradients(engine, model, DTYPES[dtype], loss_scale=64.0 if dtype == "fp16" else 1.0)
    engine.destroy()


@pytest.mark.parametrize(("stage", "wire"), in_turn([(1, "bf16"), (2, "fp16"), (0, "fp16"), (3, "bf16")]))
def test_messages_of_another_dtype_round_once(stage, wire):
    engine = start(settings(stage, communication_data_type=wire), TinyLM())
    check_gradients(engine, TinyLM(), DTYPES[wire], steps=1)
    engine.destroy()


@pytest.mark.ranks(2, 3)
def test_ranks_that_do_not_divide_the_slots_are_refused():
    made = settings(1) | {"train_batch_size": 7 * SIZE}
    with pytest.raises(ConfigError, match="do not divide the 7 micro-batches"):
        start(made, TinyLM())
    made = settings(1) | {"train_micro_batch_size_per_gpu": None}
    with pytest.raises(ConfigError, match="needs train_batch_size and train_micro_batch"):
        start(made, TinyLM())


@pytest.mark.ranks(1, 2)
def test_what_breaks_slots_is_refused():
    engine = start(settings(1), TinyLM())
    loss = engine(slot(batches(1, SLOTS * SIZE)[0], 0))
    with pytest.raises(UsageError, match="scale_wrt_gas=False"):
        engine.backward(loss, scale_wrt_gas=False)
    with pytest.raises(UsageError, match="no_sync context manager does not work"), engine.no_sync():
        pass
    with pytest.raises(ConfigError, match="is another run"):
        engine.set_train_batch_size(2 * SLOTS * SIZE)
    engine.destroy()
