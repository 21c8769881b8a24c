"""1-bit exchanges beside the backward pass, and between nodes of several ranks."""

import math

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.mesh.compressed.onebit import sent_bytes
from mpispeed.mesh.compressed.onebit_nodes import shard_length
from mpispeed.optim.exchange import Exchange
from tests.helpers.covering import on_ranks
from tests.helpers.onebit_training import (
    FREEZE,
    NAMES,
    engine_of,
    is_same_on_ranks,
    kind_of,
    run_step,
    samples,
    states_of,
)
from tests.zoo import same_bits
from tests.zoo.training import own_part

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3, 4)]
BESIDE = {"overlap_comm": True, "stage3_param_persistence_threshold": 0}


def beside(name, stage, accumulation=1, **more):
    return engine_of(name, accumulation=accumulation, zero_optimization={"stage": stage, **BESIDE}, **more)


BF16 = {"bf16": {"enabled": True}}
HOW = [(0, 1, {}), (0, 3, {}), (1, 1, {}), (0, 1, BF16), (1, 3, BF16)]


@pytest.mark.parametrize(("name", "how"), on_ranks(NAMES, HOW, ranks=(2, 3, 4)), ids=str)
def test_exchanges_beside_backward_change_no_bit(name, how):
    stage, accumulation, more = how
    plain, early = engine_of(name, stage, accumulation, **more), beside(name, stage, accumulation, **more)
    coded = 0
    for batch in samples(FREEZE + 8):
        run_step(plain, batch)
        units = early.parts.optimization.exchange.units
        coded += units.local_grads and units.is_ready()
        run_step(early, batch)
        first, second = states_of(plain), states_of(early)
        same_bits(second, first)
    assert coded > 0  # the others of 0/1 Adam are local


def test_clipping_and_loss_scales_wait_for_the_norm():
    assert not beside("OneBitAdam", 0, gradient_clipping=1.0).parts.optimization.exchange.units.is_beside
    assert not beside("OneBitAdam", 0, fp16={"enabled": True}).parts.optimization.exchange.units.is_beside


def test_a_step_that_is_skipped_forgets_errors_and_keeps_the_rest(comm):
    engine = beside("OneBitAdam", 0, bf16={"enabled": True})
    for batch in samples(FREEZE + 3):
        run_step(engine, batch)
    before = states_of(engine)
    run_step(engine, samples(1)[0], factor=math.inf if comm.rank == comm.size - 1 else 1.0)
    assert not engine.was_step_applied()
    after = states_of(engine)
    for key, values in after.items():
        is_error = "worker" in key or "server" in key
        assert torch.equal(values, torch.zeros_like(values) if is_error else before[key]), key
    for batch in samples(4, seed=6):
        assert math.isfinite(run_step(engine, batch))
        assert is_same_on_ranks(engine)


def test_a_second_backward_pass_is_refused():
    engine = beside("OneBitAdam", 0)
    for batch in samples(FREEZE + 3):
        run_step(engine, batch)
    batch = samples(1)[0]
    engine.backward(engine(*own_part(engine, batch)))
    with pytest.raises(UsageError, match="overlap_comm to false"):
        engine.backward(engine(*own_part(engine, batch)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "is_early"),
    [("OneBitAdam", True), ("OneBitLamb", False), ("ZeroOneAdam", False), ("ZeroOneAdam", True)],
)
def test_nodes_exchange_shards(name, is_early, monkeypatch, comm):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    engine = beside(name, 0) if is_early else engine_of(name)
    between = engine.mesh["data.outer"]
    losses = []
    for step, batch in enumerate(samples(26), start=1):
        engine.mesh.comm_trace.reset()
        losses.append(run_step(engine, batch))
        kind = kind_of(engine, step)
        sizes = [unit.layout.padded for unit in engine.parts.table.units]
        expected = sum(sent_bytes(shard_length(size, 2, 2), 2) for size in sizes)
        if kind in (Exchange.MOMENTUM, Exchange.CODED_GRADIENT, Exchange.DRIFT):
            assert engine.mesh.comm_trace.total_bytes("compressed_all_reduce") == expected
            assert is_same_on_ranks(engine)
    assert between.size == 2
    assert len(set(comm.gather_objects(engine.parts.counters.global_steps))) == 1
    first, last = torch.tensor([sum(losses[:4]), sum(losses[-4:])]).split(1)
    comm.all_reduce(first)
    comm.all_reduce(last)
    assert last < first
