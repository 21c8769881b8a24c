"""A job that goes wrong in one of the ways ranks diverge: hang_worker.py WAY [SECONDS]."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import mpispeed
from mpispeed import comm
from mpispeed.mesh.backends import mapped
from tests.helpers.device import stand_in

SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0

# What goes wrong; `# at NAME` marks places that reports have to name.


def missing(rank, pair):
    """One rank leaves a collective out."""
    if rank != 1:
        comm.all_reduce(torch.ones(8))  # at waits


def order(rank, pair):
    """Two ranks call collectives of two groups in opposite order."""
    if rank == 0:
        comm.all_reduce(torch.ones(8), group=pair)  # at first
        comm.barrier()
    elif rank == 1:
        comm.barrier()  # at second
        comm.all_reduce(torch.ones(8), group=pair)


def size(rank, pair):
    """Ranks come with tensors of different sizes."""
    comm.broadcast(torch.ones(8 if rank == 0 else 4), 0)  # at call


def dtype(rank, pair):
    """Ranks come with tensors of different dtypes; nothing hangs, the sum is wrong."""
    comm.all_reduce(torch.ones(8, dtype=torch.int32 if rank == 1 else torch.float32))  # at call


def kill(rank, pair):
    """A rank is killed while others wait for it in a sum through shared memory."""
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(8))


def kill_mapped(rank, pair):
    """A rank is killed while others wait for it in a sum through memory of devices that all have mapped."""
    world, device = mpispeed.init_distributed().comm, stand_in()
    world.group.device_path = mapped.open_mapped(world.group, device)
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_reduce(torch.ones(8, device=device))


def send(rank, pair):
    """A rank sends what nobody receives."""
    if rank == 0:
        comm.send(torch.ones(1 << 22), 1)  # at waits
    elif rank == 1:
        comm.barrier()  # at other


def asleep(rank, pair):
    """A rank is late."""
    if rank == 1:
        time.sleep(SECONDS)  # at sleeps
    comm.all_reduce(torch.ones(8))  # at waits


def nothing(rank, pair):
    """All is well."""


def main():
    """A few good operations, the wrong ones, and a good end for whoever gets there."""
    mpispeed.init_distributed()
    rank, pair = comm.get_rank(), comm.new_group([0, 1])
    for _ in range(5):
        comm.all_reduce(torch.ones(8))
    if rank == 0:
        (Path(os.environ["MPISPEED_RUN_DIR"]) / "begun").touch()
    globals()[sys.argv[1]](rank, pair)
    comm.barrier()  # at end
    comm.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
