"""Keys of the config that make a run tell something, each with what it makes it tell."""

import json
import logging
import re

import pytest

from mpispeed.compat.runtime_utils import see_memory_usage
from tests.zoo.models import samples
from tests.zoo.training import ADAM, config, start, train

pytestmark = [pytest.mark.mpi(min_size=1)]
BATCH, STEPS, EVERY = 24, 7, 3
SPEED = re.compile(
    r"epoch=0/micro_step=(\d+)/global_step=(\d+), RunningAvgSamplesPerSec=([\d.]+), CurrSamplesPerSec=([\d.]+), "
    r"MemAllocated=([\d.]+)GB, MaxMemAllocated=([\d.]+)GB"
)


@pytest.fixture
def records(caplog):
    """Lines of this rank's log that contain a word."""
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    yield lambda word: [r.getMessage() for r in caplog.records if word in r.getMessage()]
    logger.removeHandler(caplog.handler)


def test_throughput_is_reported_after_the_warm_up(records, comm):
    engine = start(config(1, BATCH, 2, steps_per_print=EVERY, **ADAM))
    train(engine, samples(STEPS, BATCH))
    engine.destroy()
    lines = records("SamplesPerSec")
    if comm.rank:
        assert not lines
        return
    found = [SPEED.fullmatch(line).groups() for line in lines]
    assert [(int(micro), int(step)) for micro, step, *_ in found] == [(2 * EVERY, EVERY), (4 * EVERY, 2 * EVERY)]
    assert all(float(value) > 0 for row in found for value in row[2:])
    assert all(float(now) <= float(most) for *_, now, most in found)
    # One step was measured then, so that the mean is its speed.
    assert float(found[0][2]) == pytest.approx(float(found[0][3]), rel=1e-6)


def test_throughput_can_be_switched_off(records):
    timers = {"throughput": {"enabled": False}}
    engine = start(config(1, BATCH, steps_per_print=1, timers=timers, **ADAM))
    train(engine, samples(4, BATCH))
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
    assert not records("SamplesPerSec")
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_around_the_passes(stage, records, comm):
    engine = start(config(stage, BATCH, 2, memory_breakdown=True, **ADAM))
    train(engine, samples(2, BATCH))
    engine.destroy()
    lines = records("memory of passes | ")
    assert len(lines) == (2 if comm.rank == 0 else 0)
    for line in lines:
        assert re.findall(r"(?:\| )([a-z ]+): [\d.]+ [KMG]iB", line) == [
            "before forward", "after forward", "after backward", "after step"
        ]  # fmt: skip
    assert len(records("memory | ")) == (3 if comm.rank == 0 else 0)


def test_dump_state_has_all_settings(records, comm):
    engine = start(config(1, BATCH, dump_state=True, **ADAM))
    engine.destroy()
    lines = records("config | ")
    assert len(lines) == (comm.rank == 0)
    if lines:
        found = json.loads(lines[0].removeprefix("config | "))
        assert (found["train_batch_size"], found["optimizer"]["type"], found["trace"]["end_step"]) == (BATCH, "Adam", 5)


@pytest.mark.parametrize(
    ("section", "factors"),
    [
        ({}, lambda ranks: (1.0, 1 / ranks)),
        ({"prescale_gradients": True}, lambda ranks: (1 / ranks, 1.0)),
        ({"gradient_predivide_factor": 2.0}, lambda ranks: (0.5, 2 / ranks)),
    ],
)
def test_gradients_are_divided_before_their_sum_and_after_it(section, factors, comm):
    engine = start(config(1, BATCH, **ADAM, **section))
    averaging = engine.mpispeed.parts.optimization.grads.sums.averaging
    assert (averaging.before, averaging.after) == factors(comm.size)
    engine.destroy()


def test_see_memory_usage_of_the_ranks_that_are_asked_for(records, comm):
    see_memory_usage("not forced")
    see_memory_usage("of rank 0", force=True)
    see_memory_usage("of all", force=True, ranks=range(comm.size))
    lines = records("at most")
    expected = ["of rank 0", "of all"] if comm.rank == 0 else ["of all"]
    assert [line.partition(":")[0] for line in lines] == expected
    assert all(re.search(r": host [\d.]+ [MG]iB now, [\d.]+ [MG]iB at most; device ", line) for line in lines)
