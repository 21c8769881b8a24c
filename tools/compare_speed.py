"""Speed of two commits on this machine: new / old over alternating rounds of both.

    python tools/compare_speed.py OLD NEW [--rounds 15] [--json FILE]

Each round runs `compare_speed_job.py` on two ranks with one commit and then with the other, in changing order. A row is
level if the median of the ratios is at most 1.02, or their quartiles contain 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from same_bits import MPIRUN, ROOT, build

JOB = Path(__file__).with_name("compare_speed_job.py")
LEVEL = 1.02
_IMPORT = (
    "import time; begin = time.perf_counter(); import mpispeed; mpispeed.initialize; print(time.perf_counter() - begin)"
)


def measure(source: Path, folder: Path) -> dict[str, float]:
    """Seconds by name of what is measured."""
    environment = {
        **os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MPISPEED_RUN_DIR": str(folder / "run"),
    }  # fmt: skip
    told = folder / "times.json"
    jobs = [[sys.executable, "-c", _IMPORT], [MPIRUN, "-n", "2", sys.executable, str(JOB), str(folder), str(told)]]
    out = [
        subprocess.run(job, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
        for job in jobs
    ]
    times: dict[str, float] = {"import mpispeed": float(out[0]), **json.loads(told.read_text())}
    return times


def short(commit: str) -> str:
    """The hash of a commit that may be named otherwise."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", commit], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def main() -> int:
    """Measure, print a row for each name, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="compare-speed-") as name:
        folder = Path(name)
        try:
            sources = {"old": build(options.old, folder / "old-tree")}
            sources["new"] = build(options.new, folder / "new-tree", folder / "old-tree")
            for number in range(options.rounds):
                order = ("old", "new") if number % 2 == 0 else ("new", "old")
                rounds.append({which: measure(sources[which], folder) for which in order})
        finally:
            for tree in ("old-tree", "new-tree"):
                subprocess.run(["git", "worktree", "remove", "--force", str(folder / tree)], cwd=ROOT, check=False)
    rows = {}
    print(f"{'':28}{'old ms':>10}{'new ms':>10}{'ratio':>8}  quartiles")
    for name in rounds[0]["old"]:
        ratios = [each["new"][name] / each["old"][name] for each in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        old, new = (1000 * statistics.median(each[which][name] for each in rounds) for which in ("old", "new"))
        is_level = middle <= LEVEL or low <= 1 <= high
        rows[name] = {"old_ms": old, "new_ms": new, "median": middle, "quartiles": [low, high], "level": is_level}
        print(f"{name:28}{old:10.3f}{new:10.3f}{middle:8.3f}  {low:.3f} {high:.3f}{'' if is_level else '  slower'}")
    if options.json:
        facts = {
            "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "old": short(options.old), "new": short(options.new), "rounds": options.rounds,
        }  # fmt: skip
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["level"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
