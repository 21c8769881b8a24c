"""Makes swap files and is killed, or does the same and ends well; prints what it found before and what is there."""

import os
import signal
import sys
from pathlib import Path

from mpispeed.mesh import start
from mpispeed.native.block_io import Options
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SWAP, SwapFolder


def folders(root):
    """Names of rank folders."""
    return sorted(path.name for path in root.glob(f"{SWAP.parent_name}/*"))


def main(root: Path, how: str) -> None:
    """Leave as `how` says."""
    world = start()
    before = folders(root)
    world.comm.barrier()
    preflight(world.comm, world.node, root, 1 << 20, Options())
    folder = SwapFolder(root, world.comm.share(run_name()), world.rank)
    folder.file("masters", 1 << 20)
    world.comm.barrier()
    if world.rank == 0:
        sys.stdout.write(f"{len(before)} before, {len(folders(root))} now\n")
        sys.stdout.flush()
    world.comm.barrier()
    if how == "kill all" or (how == "kill last" and world.rank == world.size - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    world.comm.barrier()


main(Path(sys.argv[1]), sys.argv[2])
