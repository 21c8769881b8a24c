"""Loads of the checkpoint that `contenders.py` left, from the disk; a job of `compare.py`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import state


def main() -> None:
    """Load three times."""
    options = state.parser(__doc__).parse_args()
    engine = state.make_engine(options)
    comm, seconds = engine.mesh.world.comm, []
    folder = Path(options.folder) / "ours"
    for _ in range(3):
        if comm.rank == 0:
            for path in folder.rglob("*.h5"):
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        comm.barrier()
        start = time.perf_counter()
        engine.load_checkpoint(str(folder))
        seconds.append(max(comm.gather_objects(time.perf_counter() - start)))
    if comm.rank == 0:
        Path(options.output).write_text(json.dumps({"seconds": seconds}))
    engine.destroy()


if __name__ == "__main__":
    main()
