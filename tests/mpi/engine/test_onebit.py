"""Training with 1-bit optimizers: as fp64 references of n workers do, alike on all ranks, in few bytes."""

import pytest
import torch

from mpispeed.mesh.compressed.onebit import padded_length
from mpispeed.optim.exchange import Exchange
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.onebit_training import (
    CLOSE,
    FREEZE,
    NAMES,
    PRECISIONS,
    engine_of,
    is_same_on_ranks,
    kind_of,
    reference_run,
    run_step,
    samples,
)
from tests.zoo import same_bits
from tests.zoo.training import weights

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 22
BYTE_STEPS = 13


@pytest.mark.parametrize(("name", "accumulation"), on_ranks(NAMES, [1, 3]))
def test_parameters_are_those_of_the_reference(name, accumulation, world):
    engine, comm = engine_of(name, 0, accumulation), world.comm
    units = engine.parts.table.units
    data, course, _ = comm.share(reference_run(name, units, comm.size, accumulation, STEPS) if comm.rank == 0 else None)
    for step, (batch, expected) in enumerate(zip(data, course, strict=True), start=1):
        run_step(engine, batch)
        for key, ours in weights(engine).items():
            theirs = expected[comm.rank][key]
            assert (ours.double() - theirs).abs().max() < CLOSE * theirs.abs().max(), (step, key)
    engine.destroy()


def trained(name, stage, accumulation, data, **more):
    """(parameters, losses) of a run whose sums are ordered."""
    engine = engine_of(name, stage, accumulation, reduction="ordered", **more)
    losses = [run_step(engine, batch) for batch in data]
    found = weights(engine), losses
    engine.destroy()
    return found


HOW = [("fp32", 1, 3), ("bf16", 0, 1), ("bf16", 1, 3), ("fp16", 0, 3), ("fp16", 1, 1)]


@pytest.mark.parametrize(("name", "how"), on_ranks(NAMES, HOW), ids=str)
def test_ranks_meet_and_the_loss_falls(name, how, world):
    dtype, stage, accumulation = how
    engine, losses, apart = engine_of(name, stage, accumulation, **PRECISIONS[dtype]), [], 0
    batch = samples(1)[0]
    for step in range(1, 18):
        total = torch.tensor(run_step(engine, batch), dtype=torch.float64)
        world.comm.all_reduce(total, "avg")
        losses.append(float(total))
        is_same = is_same_on_ranks(engine)
        assert is_same or kind_of(engine, step) is Exchange.NOTHING, step
        apart += not is_same
    assert engine.skipped_steps == 0
    assert (apart > 0) == (name == "ZeroOneAdam" and world.size > 1)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert losses[-1] < losses[FREEZE + 2]  # also after the warm-up
    engine.destroy()


@pytest.mark.parametrize(("accumulation", "clip"), in_turn([(1, 0.3), (3, 0.0)]))
def test_cut_states_change_no_bit_of_onebit_adam(accumulation, clip):
    data = samples(FREEZE + 8)
    (whole, losses), (cut, others) = (
        trained("OneBitAdam", stage, accumulation, data, gradient_clipping=clip) for stage in (0, 1)
    )
    assert losses == others
    same_bits(cut, whole)


@pytest.mark.parametrize("name", in_turn(["ZeroOneAdam", "OneBitLamb"]))
def test_stage_1_keeps_states_of_the_others_whole(name):
    data = samples(12)
    (whole, losses), (cut, others) = (trained(name, stage, 1, data) for stage in (0, 1))
    assert losses == others
    same_bits(cut, whole)


# -- bytes -------------------------------------------------------------------------------------------------------------


def sent_in_step(engine, batch):
    """Verb -> bytes of one global batch, without those that sent nothing."""
    engine.mesh.comm_trace.reset()
    run_step(engine, batch)
    found = {}
    for (verb, _), entry in engine.mesh.comm_trace.entries().items():
        found[verb] = found.get(verb, 0) + entry.bytes
    return {verb: count for verb, count in found.items() if count}


def coded_bytes(engine):
    """2 (n - 1) (L / 8n + 4) for each unit, L elements with padding."""
    n = engine.mesh["data"].size
    lengths = [padded_length(unit.layout.padded, n) for unit in engine.parts.table.units]
    assert all(length % (8 * n) == 0 for length in lengths)
    return sum(2 * (n - 1) * (length // (8 * n) + 4) for length in lengths)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("name", "how"), on_ranks(NAMES, [(1, "fp32"), (3, "bf16")], ranks=(2, 3, 4)), ids=str)
def test_bytes_of_every_step(name, how):
    accumulation, dtype = how
    engine = engine_of(name, 0, accumulation, **PRECISIONS[dtype])
    n, elements = engine.mesh["data"].size, sum(unit.layout.padded for unit in engine.parts.table.units)
    norm, size = 2 * 72 * 8 * (n - 1) // n, 4 if dtype == "fp32" else 2
    for step, batch in enumerate(samples(BYTE_STEPS), start=1):
        sent, kind = sent_in_step(engine, batch), kind_of(engine, step)
        expected = {"all_reduce": norm}
        if kind is Exchange.GRADIENT:
            expected["all_reduce"] += 2 * elements * size * (n - 1) // n
        elif kind is not Exchange.NOTHING:
            expected["compressed_all_reduce"] = coded_bytes(engine)
        assert sent == expected, (step, kind)
    kinds = [kind_of(engine, step) for step in range(1, BYTE_STEPS + 1)]
    wanted = {"OneBitAdam": 2, "OneBitLamb": 2, "ZeroOneAdam": 4}[name]
    assert len(set(kinds)) == wanted
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", in_turn(["fp32", "bf16"], ranks=(3, 2, 4)))
def test_bytes_of_onebit_adam_with_cut_states(dtype):
    engine = engine_of("OneBitAdam", 1, 1, **PRECISIONS[dtype])
    n, elements = engine.mesh["data"].size, sum(unit.layout.padded for unit in engine.parts.table.units)
    norm, size = 2 * 72 * 8 * (n - 1) // n, 4 if dtype == "fp32" else 2
    share = elements * (n - 1) // n  # of one gather or reduce-scatter of everything, in elements
    for step, batch in enumerate(samples(FREEZE + 4), start=1):
        sent = sent_in_step(engine, batch)
        gathered = size * share  # updated parameters
        if step <= FREEZE:
            assert sent == {"all_reduce": norm, "reduce_scatter": size * share, "all_gather": gathered}
        else:
            if step == FREEZE + 1:  # whole momenta, and where the variance is 0
                gathered += 4 * share + share
            assert sent == {"all_reduce": norm, "compressed_all_reduce": coded_bytes(engine), "all_gather": gathered}
    engine.destroy()
