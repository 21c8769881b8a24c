"""A rank that says where it runs from, and stays until it may end."""

import json
import os
import sys
import time
from pathlib import Path

from mpi4py import MPI

import mpispeed

comm = MPI.COMM_WORLD
places = comm.gather([os.uname().nodename, sys.executable, mpispeed.__file__, os.environ.get("MPISPEED_STAGED")])
if places is not None:
    sys.stdout.write(json.dumps(places) + "\n")
    sys.stdout.flush()
comm.Barrier()
while len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
    time.sleep(0.05)
comm.Barrier()
