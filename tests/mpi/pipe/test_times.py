"""Times and spans of passes in a pipeline: those of plain engines, over all micro-batches of a step."""

import logging
from collections import Counter

import pytest

from mpispeed.base.events import Event
from tests.helpers.pipes import BATCH, Case, Layout, train
from tests.helpers.times import monitored, read_series, timed_lines

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(1, 2, 4)]  # 16 samples in 4 micro-batches
STEPS = 2


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_series_and_lines(schedule, stage, mpi_tmp_path, comm, caplog):
    stages = 2 if comm.size % 2 == 0 else 1
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    layout = Layout(stages, 1, comm.size // stages)
    engine = Case(layout, schedule, stage).engine(wall_clock_breakdown=True, **monitored(mpi_tmp_path))
    train(engine, range(STEPS))
    engine.destroy()
    logger.removeHandler(caplog.handler)
    comm.barrier()
    micro, whole = timed_lines(caplog.records)
    assert not micro
    assert len(whole) == (STEPS if comm.rank == 0 else 0)
    if comm.rank == 0:
        sums = read_series(mpi_tmp_path, STEPS, BATCH)["backward_allreduce"]
        assert all((value > 0) == (layout.data > 1) for value in sums)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_spans_of_all_stages(schedule, comm):
    stages = 2 if comm.size > 1 else 1
    case, told = Case(Layout(stages, 1, comm.size // stages), schedule), []
    engine = case.engine(trace={"enabled": True, "start_step": 2, "end_step": 2})
    engine.bus.subscribe(Event.SPANS, told.append)
    train(engine, range(3))
    engine.destroy()
    assert len(told) == (comm.rank == 0)
    if comm.rank:
        return
    spans, names = told[0]["spans"], told[0]["names"]
    passes = {"forward": case.micro_batches, "backward": case.micro_batches, "update": 1, "step": 1}
    if schedule == "zb-h1":
        passes["backward of weights"] = case.micro_batches
    for rank in range(comm.size):
        own = spans[spans["rank"] == rank]
        assert set(own["step"].tolist()) == {2}
        found = Counter(names[number] for number in own["name"].tolist())
        assert {name: found[name] for name in passes} == passes
        of_main = own[own["lane"] == names.index("main")]
        assert (found["recv pipe"] > 0) == (stages > 1)
        assert len(of_main) > sum(passes.values())
