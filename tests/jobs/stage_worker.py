"""A rank that says where it runs from; with a file as its argument it stays until the job is ended."""

import json
import os
import sys
import time
from pathlib import Path

from mpi4py import MPI

import mpispeed

comm = MPI.COMM_WORLD
places = comm.gather([sys.executable, mpispeed.__file__, os.environ.get("MPISPEED_STAGED"), os.getpid()])
if places is not None:
    sys.stdout.write(json.dumps(places) + "\n")
    sys.stdout.flush()
comm.Barrier()
if len(sys.argv) > 1:
    if comm.rank == 0:
        Path(sys.argv[1]).touch()
    time.sleep(600)
