"""Settings of every test process: one thread, reproducible examples, engines on the host."""

import json
import os
from collections import Counter
from pathlib import Path

# Read by torch when it is imported, and several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there is a GPU too: tests compare with torch on the host. Those of devices say what they want.
os.environ.setdefault("MPISPEED_DEVICE", "cpu")

from hypothesis import settings

# No deadline: on a shared machine the slowest example measures the neighbours.
settings.register_profile("mpispeed", deadline=None, derandomize=True, database=None)
settings.load_profile("mpispeed")

TIMES = "MPISPEED_TEST_TIMES"
"""A folder; each process of pytest leaves there the seconds of its files, for tests/durations.json."""

_seconds = Counter()


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "ranks(n, ...): where the number of ranks changes nothing in what is shown, those that it runs on"
    )


def pytest_runtest_logreport(report):
    _seconds[report.location[0]] += report.duration


def pytest_unconfigure():
    if TIMES in os.environ and _seconds:
        Path(os.environ[TIMES], f"{os.getpid()}.json").write_text(json.dumps(_seconds))
