"""What a rank asks of the file system while it starts: opens and stats of files of its environment, by strace.

    python benchmarks/start/requests.py --json benchmarks/results/start-requests.json

Each row is one process of Python that imports what its name says; bytecode is in place. Half of torch's stats come from
`inspect.getmodule`, which its registration of operators calls and which resolves the paths of all loaded modules.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peers

from tests.helpers.environment_copy import make_environment

PROGRAMS = {
    "nothing": "pass",
    "torch": "import torch",
    "torch, MPI": "import torch; from mpi4py import MPI",
    "torch, MPI, HDF5, pydantic": "import torch; from mpi4py import MPI; import h5py, pydantic; pydantic.BaseModel",
    "all of these, mpispeed.initialize": "import torch; from mpi4py import MPI; import mpispeed; mpispeed.initialize",
}
CALL = re.compile(r"^\d+ +(\w+)\((.*)$")
OPENS = {"open", "openat", "openat2"}
STATS = {"stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat"}


def count(trace: Path, folder: Path) -> dict[str, int]:
    """Calls of a trace by kind, and those that name a path below `folder`, or an open file of any."""
    found: Counter[str] = Counter()
    for line in trace.read_text(errors="replace").splitlines():
        match = CALL.match(line)
        if match is None:
            continue
        call, rest = match.groups()
        kind = "opens" if call in OPENS else "stats" if call in STATS else ""
        if kind:
            found[kind] += 1
            found[f"{kind}_of_environment"] += f'"{folder}' in rest
            found[f"{kind}_missing"] += "ENOENT" in rest
    return dict(sorted(found.items()))


def main() -> None:
    """Count and print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    figures = {}
    with tempfile.TemporaryDirectory(prefix="mpispeed-requests-") as own:
        folder = Path(own) / "shared"
        python = make_environment(folder, folder)
        trace = Path(own) / "trace"
        print(f"{'a rank that imports':36s}{'opens':>8s}{'of env.':>9s}{'stats':>9s}{'of env.':>9s}")
        for name, code in PROGRAMS.items():
            words = ["strace", "-f", "-qq", "-e", "trace=%file,fstat", "-o", str(trace), python, "-c", code]
            subprocess.run(words, check=True, env={**kept, "OMP_NUM_THREADS": "1"})
            found = figures[name] = count(trace, folder)
            print(
                f"{name:36s}{found['opens']:8d}{found['opens_of_environment']:9d}{found['stats']:9d}"
                f"{found['stats_of_environment']:9d}"
            )
    peers.write_record(options.json, "start/requests", {}, figures)


if __name__ == "__main__":
    main()
