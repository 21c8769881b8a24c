"""Which of the deaths that are seen at once is taken for the first."""

import os
import time

import pytest

from mpispeed.base.recorder_words import Kind
from mpispeed.mesh.recorder import CallSequence, FlightRecorder
from mpispeed.watchdog.deaths import Deaths
from mpispeed.watchdog.exits import MemoryFacts
from mpispeed.watchdog.node_ranks import Node, Settings
from mpispeed.watchdog.process import Status
from mpispeed.watchdog.recorder_reader import RecorderView
from mpispeed.watchdog.tracker import Tracker


class SlowGroups:
    """Memory groups that take as long to look at as on a machine without a core to spare."""

    def facts(self, pid):
        time.sleep(0.05)
        return MemoryFacts(pid)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_rank_that_waited_for_nobody_died_first(tmp_path, victim):
    """The launcher has killed the others, which were in a collective, before anybody looked."""
    trackers = []
    for rank in range(3):
        recorder = FlightRecorder(tmp_path / f"rank-{rank}", rank, 3, rank)
        if rank != victim:
            recorder.begin(CallSequence.root("world", (0, 1, 2)), Kind.COLLECTIVE, "barrier")
        trackers.append(Tracker(RecorderView(tmp_path / f"rank-{rank}")))
        trackers[-1].status = Status(signal=9)
    deaths = Deaths(Settings(0, (Node("n1", (), 0, (0, 1, 2)),), "", str(tmp_path), 30.0, 600.0))
    memory = {rank: (SlowGroups(), MemoryFacts(os.getpid())) for rank in range(3)}
    deaths.add(trackers, memory)
    report, _ = deaths.report()
    assert report.facts["rank"] == victim, report.text
