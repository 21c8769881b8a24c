"""Eigenvalues of blocks under an engine: those of dense Hessians of the whole batch, at every stage."""

import logging

import pytest
import torch

from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.engine.curvature import beside_largest
from tests.helpers.covering import in_turn
from tests.helpers.hessians import BLOCKS, Attending, Scored, batch, largest
from tests.zoo import same_bits
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = pytest.mark.mpi(min_size=1)

SECTION = {"enabled": True, "layer_name": "stack.blocks", "layer_num": BLOCKS, "max_iter": 300, "tol": 1e-4}
FEW = {"max_iter": 3}
FP16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 8}
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def settings(stage, zero=None, accumulation=1, eigenvalue=None, **more):
    return config(stage, 12, accumulation, zero=zero, **ADAM, eigenvalue=SECTION | (eigenvalue or {}), **more)


@pytest.mark.ranks(1, 2, 3)
def test_they_are_those_of_dense_hessians_at_every_stage():
    """For the mean over ranks of their losses; the same bits at every stage, for which a few products do."""
    stages, told = ((0, {}), (1, {"overlap_comm": True}), (2, {}), (3, {}), (3, OFFLOAD)), []
    for (stage, zero), few in [((0, {}), {}), *((each, {"max_iter": 8}) for each in stages)]:
        engine = start(settings(stage, zero, eigenvalue=few, reduction="ordered"), Scored())
        train(engine, [batch(12)])
        told.append(engine.eigenvalues.latest)
        assert engine.eigenvalues.values == beside_largest(engine.eigenvalues.latest)
        engine.destroy()
    assert told[0] == pytest.approx(largest(Scored(), batch(12)), rel=1e-3)
    assert all(each == told[1] for each in told[1:])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_training_keeps_its_bits(stage):
    """Also with accumulation and recomputation, with which the values are the same."""
    outcomes, told = [], []
    for recompute, is_on in ((None, False), (None, True), (checkpointing.checkpoint, True)):
        given = settings(stage, None, 2, FEW | {"enabled": is_on}, reduction="ordered", gradient_clipping=0.5)
        engine = start(given, Scored(recompute))
        train(engine, [batch(12, seed) for seed in range(3)])
        outcomes.append(weights(engine))
        if is_on:
            told.append(engine.eigenvalues.latest)
        engine.destroy()
    same_bits(*outcomes[:2])
    same_bits(*outcomes[1:])
    assert told[0] == told[1]


@pytest.mark.parametrize("stage", in_turn([0, 3], (1, 2)))
def test_half_precision_scales_the_loss(stage):
    """Values are those of the loss itself, to what fp16 holds of them."""
    engine = start(settings(stage, eigenvalue={"tol": 1e-3}, fp16=FP16), Scored())
    train(engine, [batch(12)])
    assert engine.eigenvalues.latest == pytest.approx(largest(Scored(), batch(12)), rel=2e-2)
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_they_are_computed_as_often_as_the_config_says(mpi_tmp_path):
    """Each second step while somebody needs them, as points of series, known by names of layers and parameters."""
    section = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "run"}
    engine = start(settings(2, None, 2, FEW | {"gas_boundary_resolution": 2}, csv_monitor=section), Scored())
    found = engine.eigenvalues
    assert found.curvature_of("stack.blocks.0.up") is None
    for step in range(1, 7):
        before = found.latest
        found.is_needed = lambda step=step: step < 6
        train(engine, [batch(12, step)])
        assert (found.latest != before) == (step in (2, 4))
    assert found.curvature_of("stack.blocks.1.up.weight") == found.values[1]
    assert [found.curvature_of(name) for name in ("stack.first", "stack.blocks.2.up", "stack.blocks")] == [None] * 3
    engine.destroy()
    engine.mpispeed.parts.mesh.world.comm.barrier()
    for block in range(BLOCKS):
        lines = (mpi_tmp_path / "run" / f"Train_Eigenvalues_ModelBlockParam_{block}.csv").read_text().split()[1:]
        assert [int(line.split(",")[0]) for line in lines] == [24, 48]
        assert float(lines[-1].split(",")[1]) == pytest.approx(found.values[block])


@pytest.mark.ranks(1, 2)
def test_a_run_that_goes_on_has_the_values(mpi_tmp_path):
    """A checkpoint keeps the last ones; those of other blocks are left alone, and none are made up."""
    engine = start(settings(1, None, 1, FEW), Scored())
    train(engine, [batch(12)])
    latest = engine.eigenvalues.latest
    engine.save_checkpoint(str(mpi_tmp_path))
    engine.destroy()
    for stage, count, wanted in ((3, BLOCKS, latest), (0, 1, [])):
        other = start(settings(stage, None, 1, FEW | {"layer_num": count}), Scored())
        train(other, [batch(12, 4)])  # which is undone
        other.load_checkpoint(str(mpi_tmp_path))
        assert other.eigenvalues.latest == wanted
        assert other.eigenvalues.values == beside_largest(wanted)
        for wrong in (None, [1.0, float("nan")], [float("inf")], [10**400], ["1"]):
            with pytest.raises(ConfigError, match="expected a list of finite numbers"):
                other.eigenvalues.check({"eigenvalues": wrong})
        other.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stages", [(1, 3), (3, 0)])
def test_they_slow_the_fall_of_bits(mpi_tmp_path, stages):
    """The sharpest block falls five times as slowly; also where the run goes on in between."""
    given = {
        "enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 6},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 0}, "eigenvalue": SECTION | FEW,
    }  # fmt: skip
    told = []
    for stage, data in zip(stages, (range(3), range(3, 6)), strict=True):
        more = {"quantize_training": given, "fp16": FP16}
        engine = start(settings(stage, eigenvalue={"enabled": False}, **more), Scored())
        if told:
            engine.load_checkpoint(str(mpi_tmp_path))
        train(engine, [batch(12, seed) for seed in data])
        told.append({name: layer.bits for name, layer in engine.compression.layers.items()})
        sharpest = f"stack.blocks.{engine.eigenvalues.values.index(1.0)}.up"
        engine.save_checkpoint(str(mpi_tmp_path))
        engine.destroy()
    assert engine.mpispeed.parts.counters.skipped_steps == 0
    assert {bits for bits in told[0].values()} == {7}
    assert (told[1]["stack.first"], told[1][sharpest]) == (6, 7)


@pytest.mark.ranks(1, 2)
def test_a_backward_pass_of_the_script_is_told_of(caplog):
    engine = start(settings(0, None, 1, FEW), Scored())
    with caplog.at_level(logging.WARNING, "mpispeed.engine.eigenvalue"):
        engine(*own_part(engine, batch(12))).backward()
        engine.step()
    assert engine.eigenvalues.latest == []
    engine.destroy()
    is_first = engine.mpispeed.parts.mesh.rank == 0
    assert any("engine.backward(loss)" in record.getMessage() for record in caplog.records) == is_first


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_operators_without_second_derivatives_end_in_a_sentence(stage):
    """Training goes on where attention is computed by operators that have them."""
    engine = start(settings(stage, eigenvalue=FEW | {"layer_name": "blocks", "layer_num": 0}), Attending())
    x = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(2))
    with pytest.raises(UsageError, match="eager") as caught:
        train(engine, [x])
    assert caught.value.is_collective
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        train(engine, [x])
    assert engine.eigenvalues.values == [1.0]
    engine.destroy()


def test_blocks_that_are_not_there_are_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"lists of modules in it: stack\.blocks"):
        start(settings(0, eigenvalue={"layer_name": "bert.encoder.layer"}), Scored())
