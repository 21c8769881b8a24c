"""The comms logger over real ranks: tables on rank 0, and the rank that came late is named."""

import logging
import time

import pytest
import torch

import mpispeed.comm as dist
from mpispeed.mesh import comms_log

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2, 3)]

LATE_SECONDS = 0.2
"""More than other ranks come late by themselves, on a machine with fewer cores than ranks."""
CALLS = 4


@pytest.fixture
def lines(world):
    """What is logged."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("mpispeed")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)
    comms_log.of_process().detach()
    comms_log.of_process().clear()
    comms_log.of_process().settings = comms_log.Settings()


def test_the_rank_that_comes_late_is_named(world, lines):
    dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}})
    late = world.size - 1
    for _ in range(CALLS):
        dist.barrier()
        if world.rank == late:
            time.sleep(LATE_SECONDS)
        dist.all_reduce(torch.ones(256))
    dist.log_summary(show_straggler=True)
    table, waits = lines
    # "all_reduce" above one row: 1.0 KB, count, total, average, ...
    name, row = table.splitlines()[2:]
    assert (name, row.split()[:3]) == ("all_reduce", ["1.0", "KB", str(CALLS)])
    name, row = waits.splitlines()[2:]
    cells = row.split()
    assert (name, cells[:3], cells[-1]) == ("all_reduce", ["1.0", "KB", str(CALLS)], str(late))
    waited_seconds = float(cells[4]) / 1000
    if world.rank == 0:  # it has waited for the late rank each time; less what the other ranks' own delays took of it
        assert waited_seconds > 0.5 * CALLS * LATE_SECONDS
    elif world.rank == late:
        assert waited_seconds < 0.5 * CALLS * LATE_SECONDS


def test_choices_and_their_end(world, lines):
    dist.configure(enabled=True, prof_all=False, verbose=True)
    dist.all_reduce(torch.ones(4))
    assert lines == []
    dist.start_profiling_op(["broadcast"])
    dist.broadcast(torch.ones(4), 0)
    dist.stop_profiling_op(["broadcast"])
    dist.broadcast(torch.ones(4), 0)
    (line,) = lines
    assert line.startswith("comm op: broadcast | time (ms): ")
    assert " | msg size: 16.0 B | algbw (Gbps): " in line
    dist.start_profiling_comms()
    dist.barrier()
    dist.stop_profiling_comms()
    dist.barrier()
    assert len(lines) == 2
    dist.configure(debug=True, prof_all=True)
    dist.barrier()
    assert "test_comms_log.py" in lines[2]
    assert "test_choices_and_their_end" in lines[2]
    dist.configure(enabled=False)
    dist.barrier()
    assert len(lines) == 3
