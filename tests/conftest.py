"""Settings of every test process: one thread, reproducible examples, engines on the host."""

import os

# Read by torch when it is imported, and several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there is a GPU too: tests compare with torch on the host. Those of devices say what they want.
os.environ.setdefault("MPISPEED_DEVICE", "cpu")

from hypothesis import settings

# No deadline: on a shared machine the slowest example measures the neighbours.
settings.register_profile("mpispeed", deadline=None, derandomize=True, database=None)
settings.load_profile("mpispeed")
