"""Which MPI library this process loads, from where, and how many ranks it sees; run it inside a container.

python which_mpi.py                  prints a line per rank
python which_mpi.py /host/mpi 2      and fails if the library is not from that folder, or the ranks are not two
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpi4py import MPI


def loaded() -> list[str]:
    """The files of MPI libraries in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if len(line.split()) > 5}
    return sorted(path for path in paths if Path(path).name.startswith("libmpi"))


def main(folder: str | None = None, size: str | None = None) -> str | int:
    """Print what is loaded; a sentence if it is not what was wanted."""
    world = MPI.COMM_WORLD
    paths, version = loaded(), MPI.Get_library_version().splitlines()[0].strip()
    sys.stdout.write(f"rank {world.rank} of {world.size}: {version}, from {', '.join(paths)}\n")
    if folder is not None and not any(Path(path).is_relative_to(folder) for path in paths):
        return f"the MPI library is not from {folder}: bind the host's MPI there, and set MPI4PY_LIBMPI to its file"
    if size is not None and world.size != int(size):
        return f"{world.size} ranks instead of {size}: launcher and library do not belong together"
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
