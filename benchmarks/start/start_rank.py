"""A rank that imports what a training imports, joins the others and writes what that took.

mpispeed run -n 16 benchmarks/start/start_rank.py FILE
"""

import json
import os
import sys
import time
from pathlib import Path

began = time.time()

import torch  # noqa: E402 - this is what is timed
from mpi4py import MPI  # noqa: E402

import mpispeed  # noqa: E402

engine = mpispeed.initialize  # imported when it is named
ready = time.time()
world = MPI.COMM_WORLD
world.Barrier()
used = os.times()
mine = {
    "began": began,
    "import_seconds": ready - began,
    "cpu_seconds": used.user + used.system,
    "torch": torch.__file__,
    "python": sys.executable,
}
of_all = world.gather(mine)
if of_all is not None:
    figures = {"all_ready": time.time(), "ranks": of_all}
    Path(sys.argv[1]).write_text(json.dumps(figures))
