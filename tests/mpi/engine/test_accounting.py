"""Measured bytes and journalled traffic equal the formulas."""

import pytest

from mpispeed.store.layout import FlatLayout
from tests.helpers.training import batches, config, make_engine, train_engine

BATCH = 36


def padded_elements(engine) -> int:
    return sum(unit.layout.padded for unit in engine.parts.table.units)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_of_model_states(stage, dtype):
    section = {} if dtype == "fp32" else {"bf16": {"enabled": True}}
    engine = make_engine(config(stage, BATCH, 1, **section), width=64, depth=3)
    train_engine(engine, batches(2, BATCH))
    psi, ranks = padded_elements(engine), engine.mesh["data"].size
    size = 4 if dtype == "fp32" else 2
    cut = 1 if stage == 0 else ranks
    parts = engine.parts
    assert parts.params.param_bytes == size * psi
    # fp32 masters are the parameters themselves
    assert parts.params.master_bytes == (0 if dtype == "fp32" else 4 * psi // cut)
    assert parts.optimization.states.state_bytes == 8 * psi // cut
    assert parts.optimization.grads.rest_bytes == 4 * psi // (ranks if stage == 2 else 1)
    engine.destroy()
    # padding itself stays small: checked on a model of a realistic size
    layout = FlatLayout([("a", (4096, 1024), 0), ("b", (4096,), 0)], ranks)
    assert layout.padded <= 1.05 * layout.numel


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_traffic_of_a_step(stage, accumulation):
    steps = 2
    engine = make_engine(config(stage, BATCH, accumulation))
    journal = engine.mesh.journal
    data = batches(steps, BATCH)
    journal.reset()
    train_engine(engine, data)
    psi, ranks = padded_elements(engine), engine.mesh["data"].size
    share = 4 * psi * (ranks - 1) // ranks  # bytes of one gather or one reduce-scatter of everything in fp32
    loss_bytes = steps * 2 * 8 * (ranks - 1) / ranks  # the test's own all-reduce of one double
    norm_bytes = steps * 64 * 8 * (ranks - 1)
    reduced = {0: 0, 1: 1, 2: accumulation}[stage] * steps * share
    assert journal.total_bytes("reduce_scatter") == reduced
    gathered = (0 if stage == 0 else steps * share) + norm_bytes
    assert journal.total_bytes("all_gather") == gathered
    everywhere = (2 * steps * share if stage == 0 else 0) + loss_bytes
    assert journal.total_bytes("all_reduce") == pytest.approx(everywhere, abs=steps * 16)
    engine.destroy()
