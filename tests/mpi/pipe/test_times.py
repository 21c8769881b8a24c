"""Times of passes in a pipeline: the series of plain engines, over all micro-batches of a step."""

import logging

import pytest

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
