"""What the jobs of these tests run in place of a training: the same way through srun and MPI, without torch.

ranks.py show WORDS...    each rank tells its place, its variables and its words
ranks.py wait             ready, then until SIGUSR1; all ranks leave together
ranks.py interrupted      the first start marks the run as interrupted, the second as finished
ranks.py hold FILE        until there is such a file
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RUN_FOLDER = Path(os.environ.get("MPISPEED_RUN_DIR", "."))


def say(text):
    """One write for a line, so that lines of ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def show(*words):
    names = ("SLURM_JOB_ID", "MPISPEED_RUN_DIR", "MPISPEED_JOB_SCRIPT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
             "MPISPEED_WALLTIME")  # fmt: skip
    facts = {name: os.environ.get(name) for name in names}
    node = MPI.Get_processor_name()
    total = WORLD.allreduce(1)
    say(json.dumps({"rank": WORLD.rank, "size": total, "node": node, "pid": os.getpid(), "words": words, **facts}))


def wait():
    got = []
    signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    WORLD.barrier()
    say(f"rank {WORLD.rank} is ready")
    while not WORLD.allreduce(len(got)):
        time.sleep(0.05)
    say(f"rank {WORLD.rank} got {len(got)} signals and leaves")


def interrupted():
    is_first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    if WORLD.rank == 0:
        state = {"state": "interrupted" if is_first else "finished", "next_job": ""}
        (RUN_FOLDER / "state.json").write_text(json.dumps(state, indent=1))
    say(f"rank {WORLD.rank} {'is interrupted' if is_first else 'has finished'}")


def hold(file):
    say(f"rank {WORLD.rank} begins on {MPI.Get_processor_name()}")
    while not Path(file).exists():
        time.sleep(0.1)
    say(f"rank {WORLD.rank} ends on {MPI.Get_processor_name()}")


if __name__ == "__main__":
    {"show": show, "wait": wait, "interrupted": interrupted, "hold": hold}[sys.argv[1]](*sys.argv[2:])
