"""A Trainer at stage 3, then Lightning's Trainer at stage 2, on whatever ranks there are: clients_script.py FOLDER."""

import mpispeed.as_deepspeed

# isort: split
import json
import socket
import sys
from pathlib import Path

from tests.jobs.clients import lightning_trainers, trainers
from tests.jobs.clients.place import Place

RANKS = 2


def main(folder):
    found = {"trainer": trainers.train(Place(folder, RANKS), trainers.zero(3))}  # nothing has joined MPI before
    found["lightning"] = lightning_trainers.run(folder / "lightning", RANKS, "mpispeed")
    world = mpispeed.init_distributed()
    found["hosts"] = world.comm.gather_objects(socket.gethostname())
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
