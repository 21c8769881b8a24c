"""Measured bytes and journalled traffic equal the formulas."""

import pytest

from mpispeed.base.errors import StoreError
from mpispeed.sharding import sharded_param
from mpispeed.store.layout import FlatLayout
from tests.helpers import onebit_training
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.onebit_budget import compare
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

BATCH = 36


def padded_elements(engine) -> int:
    return sum(unit.layout.padded for unit in engine.parts.table.units)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"]))
def test_bytes_of_model_states(stage, dtype):
    engine = start(config(stage, BATCH, 1, dtype=dtype, **WARM), TinyLM(width=64, depth=3))
    train_averaged(engine, batches(2, BATCH))
    psi, ranks = padded_elements(engine), engine.mesh["data"].size
    size = 4 if dtype == "fp32" else 2
    cut = 1 if stage == 0 else ranks
    parts = engine.parts
    assert parts.params.shards.param_bytes == size * psi // (ranks if stage == 3 else 1)
    # fp32 masters are the parameters themselves
    assert parts.params.shards.master_bytes == (0 if dtype == "fp32" else 4 * psi // cut)
    assert parts.optimization.states.state_bytes == 8 * psi // cut
    assert parts.optimization.grads.shards.rest_bytes == 4 * psi // (ranks if stage >= 2 else 1)
    engine.destroy()
    # padding itself stays small: checked on a model of a realistic size
    layout = FlatLayout([("a", (4096, 1024), 0), ("b", (4096,), 0)], ranks)
    assert layout.padded <= 1.05 * layout.numel


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_traffic_of_a_step(stage, accumulation):
    steps = 2
    engine = start(config(stage, BATCH, accumulation, **WARM), TinyLM())
    comm_trace = engine.mesh.comm_trace
    data = batches(steps, BATCH)
    comm_trace.reset()
    train_averaged(engine, data)
    psi, ranks = padded_elements(engine), engine.mesh["data"].size
    share = 4 * psi * (ranks - 1) // ranks  # bytes of one gather or one reduce-scatter of everything in fp32
    loss_bytes = steps * 2 * 8 * (ranks - 1) / ranks  # the test's own all-reduce of one double
    norm_bytes = steps * 2 * 72 * 8 * (ranks - 1) // ranks
    reduced = {0: 0, 1: 1, 2: accumulation}[stage] * steps * share
    assert comm_trace.total_bytes("reduce_scatter") == reduced
    gathered = 0 if stage == 0 else steps * share
    assert comm_trace.total_bytes("all_gather") == gathered
    everywhere = (2 * steps * share if stage == 0 else 0) + loss_bytes + norm_bytes
    assert comm_trace.total_bytes("all_reduce") == pytest.approx(everywhere, abs=steps * 16)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("name", "stage", "dtype"), on_ranks(onebit_training.NAMES, [0, 1], ["fp32", "bf16"]))
def test_1_bit_optimizers_hold_and_send_what_was_predicted(name, stage, dtype):
    engine = onebit_training.engine_of(name, stage, 1, **onebit_training.PRECISIONS[dtype])
    assert len(compare(engine, onebit_training.Mlp())) == (4 if name == "ZeroOneAdam" else 2)
    engine.destroy()


# -- where parameters rest cut ---------------------------------------------------------------------------------------


def sharded(accumulation=1, more=None, *, is_tied=False, **zero_keys):
    settings = config(3, BATCH, accumulation, reduction="ordered", **(WARM | (more or {})), zero=zero_keys)
    return start(settings, TinyLM(is_tied=is_tied))


@pytest.mark.mpi(min_size=1)
def test_all_states_together_are_16_bytes_for_each_parameter():
    low = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    engine = start(config(3, BATCH, 1, **(WARM | low)), TinyLM(width=160))
    train_averaged(engine, batches(1, BATCH))
    psi, ranks, parts = sum(p.numel() for p in engine.parameters()), engine.mesh["data"].size, engine.parts
    assert padded_elements(engine) <= 1.02 * psi
    grads = parts.optimization.grads.shards.rest_bytes
    found = (
        parts.params.shards.param_bytes
        + parts.params.shards.master_bytes
        + parts.optimization.states.state_bytes
        + grads
    )
    # Rajbhandari et al., SC20, section 5: (2 + 2 + 12) / ranks
    assert 16 * psi / ranks <= found <= 1.05 * 16 * psi / ranks
    assert {sharded_param.is_sharded(param) for param in engine.parameters()} == {ranks > 1}
    engine.destroy()


def step_traffic(engine, data):
    """Bytes gathered and reduced in each step, and units fetched."""
    comm_trace = engine.mesh.comm_trace
    prefetcher = engine.parts.params.prefetcher
    rows = []
    for batch in data:
        comm_trace.reset()
        before = prefetcher.tally.fetches if prefetcher else 0
        train_averaged(engine, [batch])
        gathered = comm_trace.total_bytes("all_gather")
        fetched = prefetcher.tally.fetches - before if prefetcher else 0
        rows.append((gathered, comm_trace.total_bytes("reduce_scatter"), fetched))
    return rows


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("accumulation", "ahead"), on_ranks([1, 3], [0, 5 * 10**7], ranks=(2, 3, 4)))
def test_without_reuse_units_are_gathered_forward_and_backward(accumulation, ahead):
    engine = sharded(accumulation, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=ahead)
    units, ranks = engine.parts.table.units, engine.mesh["data"].size
    # What an embedding saves for its backward pass are indices: its weights are not needed again.
    (embedding,) = [unit for unit in units if unit.name == "embed.weight"]
    share, once = (4 * sum(u.layout.padded for u in some) * (ranks - 1) // ranks for some in (units, [embedding]))
    # 2 Psi in each micro-step, and Psi more for the sums of gradients: 1.5 times plain data parallelism
    expected = accumulation * (2 * share - once), accumulation * share, accumulation * (2 * len(units) - 1)
    assert step_traffic(engine, batches(3, BATCH)) == [expected] * 3
    assert engine.parts.params.prefetcher.tally.unused == 0
    assert (engine.parts.params.prefetcher.tally.ahead > 0) == (ahead > 0)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", in_turn([3, 1], ranks=(2, 3, 4)))
def test_with_reuse_units_are_gathered_once_for_each_micro_step(accumulation):
    engine = sharded(accumulation, stage3_max_live_parameters=10**9)
    units, ranks = engine.parts.table.units, engine.mesh["data"].size
    share = 4 * padded_elements(engine) * (ranks - 1) // ranks
    rows = step_traffic(engine, batches(3, BATCH))
    # from the second pass on the order is known
    assert rows[1:] == [(accumulation * share, accumulation * share, accumulation * len(units))] * 2
    assert engine.parts.params.prefetcher.tally.peak_elements == padded_elements(engine)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", in_turn([1, 3], ranks=(2, 3, 4)))
def test_units_below_the_threshold_are_gathered_once_for_each_step(accumulation):
    engine = sharded(accumulation, stage3_param_persistence_threshold=10**6)
    assert engine.parts.params.prefetcher is None
    ranks = engine.mesh["data"].size
    share = 4 * padded_elements(engine) * (ranks - 1) // ranks
    assert step_traffic(engine, batches(2, BATCH)) == [(share, accumulation * share, 0)] * 2
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2, 3)
def test_limits_hold_and_change_no_bit():
    data = batches(3, BATCH)
    free = sharded(3, is_tied=True)
    losses, expected = train_averaged(free, data), weights(free)
    largest = max(unit.layout.padded for unit in free.parts.table.units)
    everything = padded_elements(free)
    free.destroy()
    peaks = {}
    for cap, ahead in (
        (largest // 2, 0), (largest // 2, 10**9), (largest, largest), (2 * largest, 0), (2 * largest, largest),
        (everything, 10**9),
    ):  # fmt: skip
        limits = {"stage3_max_live_parameters": cap, "stage3_prefetch_bucket_size": ahead}
        engine = sharded(3, is_tied=True, stage3_max_reuse_distance=10**9, **limits)
        assert train_averaged(engine, data) == losses
        tally = engine.parts.params.prefetcher.tally
        assert tally.peak_elements <= cap + largest
        peaks[cap, ahead] = tally.peak_elements
        assert tally.live_elements <= cap
        ours = weights(engine)
        same_bits(ours, expected)
        engine.destroy()
    assert peaks[largest // 2, 0] < peaks[everything, 10**9] == everything


@pytest.mark.mpi(min_size=2)
def test_a_limit_below_what_one_module_needs_says_how_much_it_needs():
    engine = sharded(stage3_max_live_parameters=0)
    sizes = {unit.name: unit.layout.padded for unit in engine.parts.table.units}
    with pytest.raises(StoreError, match="max_live_parameters 0 and one module") as caught:
        train_averaged(engine, batches(1, BATCH))
    # the model's own `scale` is in use while its blocks run
    need = sizes["scale"] + sizes["blocks.0"]
    assert f"beside {sizes['scale']} of scale" in str(caught.value)
    assert f"at least {need}" in str(caught.value)
    engine.destroy()
