"""Trains a pipeline in which one rank fails, and catches nothing; the arguments say where, and on which ranks."""

import sys

from mpispeed.mesh import start
from tests.helpers.pipe_faults import FAULT, engine, micro_batches
from tests.helpers.pipes import Layout

if __name__ == "__main__":
    place, pipe, model, rank = sys.argv[1], *map(int, sys.argv[2:])
    world = start()
    made = engine(world, Layout(pipe, model, 1), "1f1b", 0)
    made.train_batch(micro_batches(made, 0))
    FAULT.arm(place if world.rank == rank else "", 1)
    made.train_batch(micro_batches(made, 1))
