"""Times of passes: lines of the log, series of monitors, and sums of gradients wherever they are waited for."""

import logging
import time

import pytest

from tests.helpers.times import NAMES, monitored, read_series, timed_lines
from tests.zoo.models import samples
from tests.zoo.training import ADAM, config, own_part, start, train

pytestmark = [pytest.mark.mpi(min_size=1)]
ROUNDED_MS = 0.006  # two decimals
BATCH, STEPS, MICRO_STEPS, DELAY_SECONDS = 24, 2, 2, 0.3


@pytest.fixture
def lines(caplog):
    """Times in this rank's log, in milliseconds by name: (of micro-steps, of steps)."""
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    yield lambda: timed_lines(caplog.records)
    logger.removeHandler(caplog.handler)


def be_late(rank, mark):
    """Wait on all ranks but rank 0 until that has come here, and longer."""
    if rank == 0:
        mark.touch()
        return
    deadline = time.monotonic() + 120
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(DELAY_SECONDS)


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, True), (2, False), (2, True), (3, True)])
def test_series_and_lines_of_all_stages(stage, overlaps, mpi_tmp_path, comm, lines):
    settings = config(stage, BATCH, MICRO_STEPS, zero={"overlap_comm": overlaps}, **ADAM, **monitored(mpi_tmp_path))
    engine = start({**settings, "wall_clock_breakdown": True})
    assert engine.wall_clock_breakdown() is True
    for batch in samples(STEPS, BATCH):
        for micro in range(MICRO_STEPS):
            loss = engine(*own_part(engine, batch, micro))
            if engine.micro_steps == MICRO_STEPS - 1:
                be_late(comm.rank, mpi_tmp_path / "rank 0 is here")
            engine.backward(loss)
            engine.step()
    engine.destroy()
    micro, whole = lines()
    if comm.rank:
        assert not micro
        assert not whole
        return
    values = read_series(mpi_tmp_path, STEPS, BATCH)
    assert (len(micro), len(whole)) == (STEPS * MICRO_STEPS, STEPS)
    for number, row in enumerate(whole):
        parts = micro[number * MICRO_STEPS : (number + 1) * MICRO_STEPS]
        for short, name in zip(("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"), NAMES, strict=True):
            assert row[short] == pytest.approx(values[name][number], abs=ROUNDED_MS)
            total = sum(part[f"{short}_microstep"] for part in parts)
            assert total == pytest.approx(row[short], abs=(MICRO_STEPS + 1) * ROUNDED_MS)
        assert parts[0]["step_microstep"] == 0
    sums = values["backward_allreduce"]
    if comm.size == 1:
        assert sums == [0.0] * STEPS
    elif stage < 3:  # at stage 3 what waits for the late ranks is a gather of parameters, inside of the pass
        assert sums[0] > 300 * DELAY_SECONDS  # of a rank whose own part of the pass takes a while, too


def test_evaluations_are_left_out(lines, comm):
    engine = start(config(0, BATCH, wall_clock_breakdown=True, **ADAM))
    [batch] = samples(1, BATCH)
    seconds = []
    engine.mpispeed.parts.clock.now = lambda: sum(seconds)
    engine.module.register_forward_pre_hook(lambda *_: seconds.append(1 if engine.training else 100))
    engine.eval()
    engine(*own_part(engine, batch))
    engine.train()
    train(engine, [batch])
    engine.destroy()
    micro, whole = lines()
    if comm.rank == 0:
        assert seconds == [100, 1]
        assert whole[0]["fwd"] == 1000
        assert len(micro) == 1


def test_nothing_is_measured_or_told_unless_asked(lines):
    engine = start(config(2, BATCH, **ADAM))
    clock, grads = engine.mpispeed.parts.clock, engine.mpispeed.parts.optimization.grads
    assert clock.now is time.perf_counter
    assert clock.entering is None
    assert grads._stopwatch is None
    train(engine, samples(1, BATCH))
    assert engine.wall_clock_breakdown() is False
    assert lines() == ([], [])
    engine.destroy()


def test_the_flops_profiler_switches_the_times_on(mpi_tmp_path, comm):
    engine = start(config(2, BATCH, flops_profiler={"enabled": True}, **ADAM, **monitored(mpi_tmp_path)))
    assert engine.wall_clock_breakdown() is True
    train(engine, samples(STEPS, BATCH))
    engine.destroy()
    if comm.rank == 0:
        assert set(read_series(mpi_tmp_path, STEPS, BATCH)) == set(NAMES)


def test_passes_that_a_script_starts_itself(comm, lines):
    engine = start(config(1, BATCH, wall_clock_breakdown=True, **ADAM))
    for batch in samples(STEPS, BATCH):
        engine(*own_part(engine, batch)).backward()
        engine.step()
    engine.destroy()
    micro, whole = lines()
    assert (len(micro), len(whole)) == ((STEPS, STEPS) if comm.rank == 0 else (0, 0))
    assert all(row["bwd_inner"] > 0 for row in whole)
