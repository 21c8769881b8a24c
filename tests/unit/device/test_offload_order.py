"""What crosses between a device and states that are offloaded, in which order, and what the host waits for.

A step of one rank in bf16, as it is seen here (benchmarks/gpu/offload.py measures it):

    backward    the gradients of a unit are squared on the device, then start to cross, in 16 bits, beside the backward
                pass of the units before it; nothing waits for them
    norm        waits for the squares of the last unit, not for its gradients
    update      of a unit waits for its gradients; its parameters start to return, in 16 bits, before the next unit is
                updated, and nothing waits for them
"""

import itertools

import pytest
import torch

import mpispeed
from mpispeed.base import device as devices
from mpispeed.optim.host_rule import HostRule
from mpispeed.sharding.arrivals import Arrivals
from tests.helpers.device import stand_in, trace
from tests.helpers.on_device import moved
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train, weights, zero_section

BATCH = 12
CPU, PINNED = {"device": "cpu"}, {"device": "cpu", "pin_memory": True}
DTYPES = {"BFloat16", "Float"}  # of gradients and parameters; exact sums are integers


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setenv("MPISPEED_DEVICE", stand_in().type)
    yield stand_in()
    devices.IN_USE.clear()


def engine_of(device, stage, where, accumulation=1, dtype="bf16", **more):
    """Of several units at every stage."""
    section = zero_section(stage, reduce_bucket_size=3000, offload_optimizer=where)
    settings = config(0, BATCH, accumulation, dtype=dtype, **(WARM | {"zero_optimization": section} | more))
    return mpispeed.initialize(model=moved(TinyLM(), device), config=settings)[0]


def look(monkeypatch, engine, data):
    """The lines of one step, with notes around the update of each window."""
    update_one = HostRule.update_one

    def noted(self, window, *more):
        trace.note(f"update {window.key[0]} {window.master.numel()} {window.grad.dtype}")
        return update_one(self, window, *more)

    monkeypatch.setattr(HostRule, "update_one", noted)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (trace.note("step"), step()))
    with trace.traced() as lines:
        train(engine, data)
    return lines


def crossed(lines, what):
    """Bytes of gradients or parameters, and whether all were queued."""
    found = [line for line in lines if line.what == what and set(line.words[:2]) <= DTYPES and line.elements > 20]
    return sum(line.nbytes for line in found), all(line.is_queued for line in found)


PLACES = [(1, PINNED, 1), (2, CPU, 1), (2, PINNED, 1), (2, PINNED, 3), (3, PINNED, 1), (3, CPU, 2)]


@pytest.mark.parametrize(("stage", "where", "accumulation"), PLACES, ids=str)
def test_two_bytes_of_an_element_cross_each_way(device, monkeypatch, stage, where, accumulation):
    engine = engine_of(device, stage, where, accumulation)
    units = engine.mpispeed.parts.params.table.units
    train(engine, batches(1, BATCH))
    lines = look(monkeypatch, engine, batches(1, BATCH, seed=5))
    engine.destroy()
    padded = sum(unit.layout.padded for unit in units)
    used = sum(entry.numel for unit in units for entry in unit.layout.entries)
    passes = accumulation if stage > 1 else 1
    there, are_queued = crossed(lines, "to_host")
    assert len(units) > 3
    assert are_queued
    assert there == 2 * padded * passes
    at = next(i for i, line in enumerate(lines) if line.what == "update")
    back, are_queued = crossed(lines[at:], "to_device")
    assert are_queued
    assert 2 * used - 100 <= back <= 2 * padded


@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_waits_for_squares_and_then_for_one_unit_at_a_time(device, monkeypatch, stage):
    engine = engine_of(device, stage, PINNED)
    train(engine, batches(1, BATCH))
    lines = look(monkeypatch, engine, batches(1, BATCH, seed=5))
    units = engine.mpispeed.parts.params.table.units
    engine.destroy()
    begin = max(i for i, line in enumerate(lines) if line.what == "step")
    first = next(i for i, line in enumerate(lines) if line.what == "update")
    gradients = [line for line in lines[:first] if line.what == "to_host" and line.words[0] == "BFloat16"]
    assert [line.elements for line in gradients] == [unit.layout.padded for unit in reversed(units)]
    # Nobody waits for them beside the backward pass, not even the stream of the model.
    assert len({line.stream for line in gradients} - {"0"}) == 1
    assert {line.stream for line in lines[first:] if line.what == "to_device"} == {"0"}
    assert not [line for line in lines if line.thread == "other" and line.what == "wait"]
    waits = [line for line in lines[begin:] if line.what == "wait"]
    assert sum("idle" not in line.words for line in waits) <= 2  # the squares of the last unit, and its gradients
    assert sum(line.what == "wait" for line in lines[begin:first]) <= len(units) + 1
    # Each window is on its way back before the next is updated, and the host waits between them once for a unit.
    updates = [line for line in lines[first:] if line.what in ("update", "to_device")]
    assert [line.what for line in updates] == ["update", "to_device"] * (len(updates) // 2)
    windows = [(int(line.words[0]), i) for i, line in enumerate(lines) if line.what == "update"]
    for (unit, at), (following, then) in itertools.pairwise(windows):
        assert sum(line.what == "wait" for line in lines[at:then]) <= (unit != following)
    assert {line.words[2] for line in updates if line.what == "update"} == {"torch.bfloat16"}


def results(engine, data):
    losses = train(engine, data)
    found = losses, engine.get_global_grad_norm(), {name: x.cpu() for name, x in weights(engine).items()}
    engine.destroy()
    return found


WAYS = [
    (2, PINNED, 1, "bf16"),
    (2, CPU, 3, "bf16"),
    (1, PINNED, 3, "bf16"),
    (1, CPU, 1, "fp16"),
    (3, PINNED, 2, "fp16"),
    (2, PINNED, 1, "fp32"),
    (3, {"device": "nvme"}, 1, "bf16"),
    (3, {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True}, 3, "bf16"),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_bits_are_those_of_sums_in_the_dtype_of_accumulators(device, monkeypatch, tmp_path, way):
    """fp16 begins with a scale at which the first steps overflow and are skipped."""
    stage, where, accumulation, dtype = way
    where = where | ({"nvme_path": str(tmp_path)} if where["device"] == "nvme" else {})
    more = {"fp16": {"enabled": True, "initial_scale_power": 24}} if dtype == "fp16" else {}
    found = results(engine_of(device, stage, where, accumulation, dtype, **more), batches(4, BATCH))
    monkeypatch.setattr(Arrivals, "takes", staticmethod(lambda stored, values: False))
    monkeypatch.setattr(Arrivals, "note_rounded", lambda self, index, dtype: None)
    same_bits(found, results(engine_of(device, stage, where, accumulation, dtype, **more), batches(4, BATCH)))


@pytest.mark.parametrize(("stage", "where"), [(2, PINNED), (2, CPU), (1, PINNED)], ids=str)
def test_gradients_that_a_script_changes_count_as_changed(device, monkeypatch, stage, where):
    """They are read in fp32, and what is written there is what the norm and the update see."""

    def train_with_edits():
        engine = engine_of(device, stage, where)
        losses = []
        for (batch,) in zip(batches(3, BATCH), strict=True):
            loss = engine(batch.to(device))
            engine.backward(loss)
            for part in engine.optimizer.averaged_gradients[0]:
                assert part.dtype == torch.float32
                part.mul_(1.001)
            engine.step()
            losses.append(float(loss.detach()))
        found = losses, engine.get_global_grad_norm(), {name: x.cpu() for name, x in weights(engine).items()}
        engine.destroy()
        return found

    found = train_with_edits()
    monkeypatch.setattr(Arrivals, "takes", staticmethod(lambda stored, values: False))
    monkeypatch.setattr(Arrivals, "note_rounded", lambda self, index, dtype: None)
    same_bits(found, train_with_edits())


def test_gradients_in_files_take_half_of_their_bytes(device, tmp_path):
    """The accumulator of a unit has room for fp32, of which one micro-batch uses the first half."""
    engine = engine_of(device, 3, {"device": "nvme", "nvme_path": str(tmp_path)})
    (batch,) = batches(1, BATCH)
    engine.backward(engine(batch.to(device)))
    parts = engine.mpispeed.parts
    grads = parts.optimization.grads
    grads.finish()
    for unit in parts.params.table.units:
        stored, _ = grads.shards.stored(unit)
        assert stored.dtype == torch.bfloat16
        assert stored.is_swapped
        assert torch.equal(grads.shards.reduced(unit), stored.get().float())
    engine.step()
    engine.destroy()
