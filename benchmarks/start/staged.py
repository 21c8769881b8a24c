"""The start of a job from a file system whose metadata are slow, with the environment staged and without, in turn.

    python benchmarks/start/staged.py --json benchmarks/results/start-staged.json
    python benchmarks/start/staged.py --cache 0 --rounds 1 --json benchmarks/results/start-staged-uncached.json

Start it without mpirun. The environment of this Python is shown at another place by FUSE, where each request of
metadata takes 5 ms (`slow_folder.c`), and jobs start from there: from `mpispeed run` to the moment at which all ranks
have imported torch and mpispeed and have met. With `--cache 0` the kernel asks for each part of each path again, which
is more than a network file system does to names it has leases on; with 1 it remembers them for a second, as NFS does
for three. The time of a start is cut into what the launcher takes until the first rank begins (with the environment
staged this has the unpacking, which is shown apart), and into what ranks take, of which the processor has its part.
Reads of data are not slowed. The archive is packed once, before; on this machine it lies outside of the slow folder, as
that is read-only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import slow_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peers

from tests.helpers.environment_copy import make_environment

RANK = Path(__file__).with_name("start_rank.py")
CONTENDERS = {"shared": [], "staged": ["--stage-env"]}


def variables(own: Path, place: Path) -> dict[str, str]:
    """Those of the jobs: the archive goes to a folder of this benchmark, its copies to `place`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(own / "cache"),
        "MPISPEED_STAGE_DIR": str(place),
    }


def run_job(options: argparse.Namespace, name: str, python: Path, seen: slow_folder.SlowFolder) -> dict[str, Any]:
    """Start one job; what it took, and what it asked for."""
    own = seen.at.parent
    said = own / "ranks.json"
    words = [python, "-m", "mpispeed", "run", "-n", str(options.ranks), *CONTENDERS[name], RANK, said]
    before, began = seen.counts(), time.time()
    done = subprocess.run(words, check=False, env=variables(own, options.place), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"staged: the job ended with {done.returncode}\n{done.stderr}")
    unpacked = re.search(r"unpacked in ([\d.]+) s", done.stderr)
    ended = time.time()
    asked = slow_folder.difference(seen.counts(), before)
    figures = json.loads(said.read_text())
    ranks = figures["ranks"]
    first = min(rank["began"] for rank in ranks)
    cpu = sum(rank["cpu_seconds"] for rank in ranks)
    return {
        "seconds": figures["all_ready"] - began,
        "launcher_seconds": first - began,
        "unpack_seconds": float(unpacked[1]) if unpacked else 0.0,
        "ranks_seconds": figures["all_ready"] - first,
        "ranks_cpu_seconds": cpu,
        "whole_job_seconds": ended - began,
        "metadata_requests": sum(asked[kind] for kind in slow_folder.METADATA),
        "requests": asked,
        "torch": ranks[0]["torch"],
    }


def time_parts(python: Path, own: Path, place: Path) -> dict[str, Any]:
    """Packing, and finding that the archive is that of the environment, each alone and from fast files."""
    environ = variables(own, place)
    stage = [python, "-m", "mpispeed", "stage"]
    times = {}
    for what in ("pack", "pack_again"):
        began = time.time()
        subprocess.run([*stage, "pack"], check=True, env=environ, stdout=subprocess.DEVNULL)
        times[f"{what}_seconds"] = time.time() - began
    (archive,) = (own / "cache").rglob("environment-*.tar")
    return {**times, "archive_bytes": archive.stat().st_size}


def report(figures: dict[str, Any], ranks: int) -> None:
    """Print the table."""
    heads = f"{'start s':>9s}{'launcher s':>12s}{'unpacking':>11s}{'ranks s':>9s}{'their CPU s':>13s}"
    print(f"{'':10s}{heads}{'requests of a rank':>20s}")
    for name, runs in figures.items():
        middle = {
            key: statistics.median(run[key] for run in runs) for key in runs[0] if key not in ("requests", "torch")
        }
        print(
            f"{name:10s}{middle['seconds']:9.1f}{middle['launcher_seconds']:12.1f}{middle['unpack_seconds']:11.1f}"
            f"{middle['ranks_seconds']:9.1f}"
            f"{middle['ranks_cpu_seconds']:13.1f}{middle['metadata_requests'] / ranks:20.0f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--wait-ms", type=float, default=5.0, help="of a request of metadata")
    parser.add_argument("--cache", type=float, default=1.0, help="seconds for which the kernel keeps names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where all of this is kept, of the same disk as the environment")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where nodes unpack to")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if reason := slow_folder.missing():
        sys.exit(f"staged: {reason}")
    figures: dict[str, Any] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="mpispeed-staged-", dir=options.folder) as text:
        own = Path(text)
        python = make_environment(own / "shared", own / "seen")
        with slow_folder.SlowFolder(own / "shared", own / "seen", 0, 60):
            parts = time_parts(python, own, options.place)
        print(" ".join(f"{name} {value:.1f}" for name, value in parts.items()), flush=True)
        with slow_folder.SlowFolder(own / "shared", own / "seen", options.wait_ms / 1000, options.cache) as seen:
            for _ in range(options.rounds):
                for name in CONTENDERS:
                    figures[name].append(run_job(options, name, python, seen))
                    shown = {key: value for key, value in figures[name][-1].items() if key.endswith("seconds")}
                    print(name, " ".join(f"{key} {value:.1f}" for key, value in shown.items()), flush=True)
    report(figures, options.ranks)
    pairs = zip(*figures.values(), strict=True)
    ratio = statistics.median(shared["seconds"] / staged["seconds"] for shared, staged in pairs)
    print(f"staged starts {ratio:.1f} times as fast")
    about = {"ranks": options.ranks, "wait_ms": options.wait_ms, "cache_seconds": options.cache}
    about["place"] = str(options.place)
    peers.write_record(options.json, "start/staged", about, {"ratio": ratio, "parts": parts, "starts": figures})


if __name__ == "__main__":
    main()
