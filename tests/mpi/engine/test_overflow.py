"""A gradient that is not finite on one rank skips the step on all, at every dtype, and leaves everything as it was."""

import contextlib
import logging
import math

import pytest
import torch

from mpispeed.base.errors import PrecisionError
from tests.helpers.covering import in_turn, on_ranks
from tests.zoo import same_bits
from tests.zoo.models import samples
from tests.zoo.training import ADAM, config, own_part, start, train, weights

pytestmark = pytest.mark.mpi(min_size=1)
STAGES = pytest.mark.parametrize("stage", in_turn([0, 1, 2], ranks=(2, 3, 4, 1)))
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}}


def run(engine, flags, bad=math.inf):
    """One step per letter, T with a gradient that is `bad` on the last rank only; returns the scale after each."""
    scales = []
    for flag, batch in zip(flags, samples(len(flags)), strict=True):
        is_bad = flag == "T" and engine.global_rank == engine.world_size - 1
        loss = engine(*own_part(engine, batch))
        engine.backward(loss * bad if is_bad else loss)
        engine.step()
        scales.append(engine.optimizer.cur_scale)
    return scales


def fp16(**section):
    return {"fp16": {"enabled": True, "initial_scale_power": 8, **section}}


@contextlib.contextmanager
def recorded(caplog):
    """What this rank logs meanwhile is in `caplog`."""
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def states_of(engine):
    found = engine.parts.optimization.states
    return [tensor.clone() for unit in engine.parts.table.units for tensor in found.of(unit).values()]


@pytest.mark.parametrize(("stage", "bad"), on_ranks([0, 1, 2], [math.inf, -math.inf, math.nan]))
def test_overflow_on_one_rank_skips_on_all(stage, bad):
    settings = config(stage, **ADAM, **WARMUP, **fp16(hysteresis=1))
    settings["zero_optimization"]["overlap_comm"] = bad == math.inf
    engine = start(settings)
    run(engine, "FF")
    before, states, lr, norm = weights(engine), states_of(engine), engine.get_lr(), engine.get_global_grad_norm()
    schedule = engine.lr_scheduler.state_dict()
    assert engine.was_step_applied()
    assert not engine.optimizer.overflow
    assert run(engine, "T", bad) == [128]
    assert not engine.was_step_applied()
    assert engine.optimizer.overflow
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 1, 36)
    assert engine.get_lr() == lr
    assert engine.lr_scheduler.state_dict() == schedule
    assert engine.get_global_grad_norm() == norm
    same_bits(weights(engine), before)
    same_bits(states_of(engine), states)
    run(engine, "F")  # nothing of the bad gradient is left
    assert engine.was_step_applied()
    assert engine.get_lr() != lr
    assert math.isfinite(engine.get_global_grad_norm())
    engine.destroy()


@STAGES
def test_a_skipped_step_leaves_no_trace_in_the_next(stage):
    results = []
    for flags in ("FTF", "FF"):
        engine = start(config(stage, **ADAM, **fp16(initial_scale_power=4, hysteresis=3), reduction="ordered"))
        data = samples(3)
        chosen = [data[0], data[1], data[2]] if "T" in flags else [data[0], data[2]]
        for flag, batch in zip(flags, chosen, strict=True):
            loss = engine(*own_part(engine, batch))
            engine.backward(loss * math.nan if flag == "T" else loss)
            engine.step()
        results.append(weights(engine))
        engine.destroy()
    # gradients were scaled by 16 or by 8 (a power of two), which changes no bit
    same_bits(*results)


WINDOW = {"loss_scale_window": 2}
COURSES = {
    ("FFFFFFF", 2, False): [256, 512, 512, 1024, 1024, 2048, 2048],
    ("TTFFFTFFF", 2, False): [256, 128, 128, 256, 256, 256, 256, 512, 512],
    ("TFTT", 1000, False): [256, 256, 128, 64],
    ("TFTT", 1000, True): [256, 256, 256, 128],
}


@pytest.mark.parametrize(
    ("stage", "case"),
    on_ranks([0, 1, 2], list(COURSES)),
    ids=lambda value: str(value) if isinstance(value, int) else f"{value[0]}-{value[1]}-{value[2]}",
)
def test_trajectory_of_the_scale(stage, case):
    flags, window, is_consecutive = case
    section = fp16(loss_scale_window=window, consecutive_hysteresis=is_consecutive)
    engine = start(config(stage, **ADAM, **section))
    assert engine.optimizer.dynamic_loss_scale
    assert engine.optimizer.loss_scale == 256
    assert engine.optimizer.scale_window == window
    assert engine.optimizer.min_loss_scale == 1
    assert run(engine, flags) == COURSES[case]
    assert engine.optimizer.cur_iter == len(flags)
    assert engine.skipped_steps == flags.count("T")
    assert engine.global_steps == len(flags)
    engine.destroy()


@pytest.mark.deepspeed_row("a11")
@pytest.mark.parametrize("stage", in_turn([1, 2, 3], ranks=(2, 3, 1, 4)))
def test_the_scale_stops_at_its_minimum(stage):
    engine = start(config(stage, **ADAM, **fp16(initial_scale_power=1, hysteresis=1)))
    assert run(engine, "T") == [1]
    with pytest.raises(PrecisionError, match="minimum"):
        run(engine, "T")
    engine.destroy()


@pytest.mark.deepspeed_row("a11")
@pytest.mark.parametrize("optimizer", ["Adam", "OneBitAdam"])
def test_stage_0_goes_on_at_the_least_scale_with_a_warning(optimizer, caplog):
    section = {"optimizer": {"type": optimizer, "params": {"lr": 1e-2}}}
    engine = start(config(0, **section, **fp16(initial_scale_power=1, hysteresis=1)))
    before = weights(engine)
    with recorded(caplog):
        assert run(engine, "TTTT") == [1] * 4
    same_bits(weights(engine), before)
    assert (engine.skipped_steps, engine.global_steps) == (4, 4)
    told = [record.getMessage() for record in caplog.records if "least loss scale" in record.getMessage()]
    assert len(told) == (engine.global_rank == 0)  # once for a row of them
    run(engine, "F")
    assert engine.was_step_applied()
    engine.destroy()


@STAGES
def test_a_static_scale_is_kept(stage):
    engine = start(config(stage, **ADAM, fp16={"enabled": True, "loss_scale": 138.0}))
    assert not engine.optimizer.dynamic_loss_scale
    assert engine.loss_scale() == 138.0
    assert run(engine, "FTF") == [138.0, 138.0, 138.0]
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    engine.destroy()


@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2], ["fp32", "bf16"]))
def test_without_a_scale_the_step_is_skipped_with_a_warning(stage, dtype, caplog):
    engine = start(config(stage, dtype=dtype, **ADAM, **WARMUP))
    run(engine, "F")
    before, lr = weights(engine), engine.get_lr()
    with recorded(caplog):
        run(engine, "T", math.nan)
    found = [r for r in caplog.records if r.levelno == logging.WARNING and "skipped" in r.getMessage()]
    assert len(found) == (1 if engine.global_rank == 0 else 0)
    same_bits(weights(engine), before)
    assert engine.get_lr() == lr
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)
    engine.destroy()


@STAGES
def test_scale_and_counters_return_from_a_checkpoint(stage, mpi_tmp_path):
    settings = config(stage, **ADAM, **fp16(**WINDOW))
    first = start(settings)
    run(first, "TTFT")
    first.save_checkpoint(str(mpi_tmp_path))
    second = start(settings)
    second.load_checkpoint(str(mpi_tmp_path))
    assert second.optimizer.cur_scale == first.optimizer.cur_scale
    assert second.optimizer.cur_iter == 4
    assert (second.global_steps, second.skipped_steps) == (4, 3)
    assert run(second, "FFFTF") == run(first, "FFFTF")
    same_bits(weights(second), weights(first))
    first.destroy()
    second.destroy()


@STAGES
def test_the_norm_is_reported_without_the_scale(stage):
    norms = []
    for power in (2, 8):
        engine = start(config(stage, **ADAM, **fp16(initial_scale_power=power)))
        train(engine, samples(1))
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    plain = start(config(stage, **ADAM))
    train(plain, samples(1))
    assert norms[1] == pytest.approx(plain.get_global_grad_norm(), rel=5e-3)
    plain.destroy()


@STAGES
def test_client_optimizers_in_fp16_show_the_scale(stage):
    def make(params):
        return torch.optim.Adam(params, lr=1e-2)

    engine = start(config(stage, **fp16()), optimizer=make)
    assert type(engine.basic_optimizer) is torch.optim.Adam
    assert engine.optimizer.optimizer is engine.basic_optimizer
    assert engine.optimizer.param_groups is engine.basic_optimizer.param_groups
    assert run(engine, "F") == [256]
    engine.optimizer.set_lr(0.5)
    assert engine.get_lr() == engine.optimizer.get_lr() == [0.5]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.optimizer.no_such_thing
    engine.destroy()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("section", ["fp16", "bf16"])
def test_inputs_in_another_dtype_are_explained(section):
    engine = start(config(0, **ADAM, **{section: {"enabled": True}}), torch.nn.Linear(8, 2))
    with pytest.raises(RuntimeError, match=rf"same dtype.*\n{section}\.enabled makes the model compute in .*float16"):
        engine(torch.ones(3, 8))
    engine.destroy()
