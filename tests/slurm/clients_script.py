"""A Trainer at stage 3, then Lightning's Trainer at stage 2, on whatever ranks there are: clients_script.py FOLDER."""

import mpispeed.as_deepspeed

# isort: split
import json
import socket
import sys
from pathlib import Path

from transformers import set_seed

import mpispeed
from tests.jobs.clients import lightning_trainers, trainers
from tests.jobs.clients.place import Place


def main(folder):
    set_seed(1)
    args = trainers.arguments(
        Place(folder, 2), trainers.zero(3)
    )  # before anything has joined MPI, as in users' scripts
    found = {"trainer": trainers.train(Place(folder, args.world_size), trainers.zero(3))}
    found["lightning"] = lightning_trainers.run(folder / "lightning", 2, "mpispeed")
    found["hosts"] = mpispeed.init_distributed().comm.gather_objects(socket.gethostname())
    if args.process_index == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
