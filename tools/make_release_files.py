"""Small checkpoints, a run record, a token store and an index file of this release, in tests/releases/VERSION.

    mpirun -n 2 python tools/make_release_files.py            for a version that has none yet
    mpirun -n 2 python tools/make_release_files.py --again    in place of those there; only before the release is out

A record tells the name of its host: `unshare --uts sh -c "hostname node1; ..."` gives it another one. The files are
made once for each release, and never changed afterwards: tests load all of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpispeed.base.version import VERSION
from mpispeed.mesh import start
from tests.helpers.release_files import FOLDER, make


def main() -> int:
    """Make the files, and say how large they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="replace those that are there")
    options = parser.parse_args()
    comm, folder = start().comm, FOLDER / VERSION
    if comm.share(folder.exists()) and not options.again:
        if comm.rank == 0:
            sys.stderr.write(f"{folder} is there; it belongs to a release, and stays (--again before it is out)\n")
        return 1
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    comm.barrier()
    make(folder)
    if comm.rank == 0:
        sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
        for path, size in sizes.items():
            print(f"{size:8} {path.relative_to(FOLDER)}")
        print(f"{sum(sizes.values()):8} bytes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
