"""Hang drills again and again: each way to diverge, once with the default limit of 30 s and often with one of 3 s.

    python benchmarks/soak/drills.py [--times 20] [--ways missing send] [--json FILE]

A drill counts only if the one report names the ranks and the lines that tests/helpers/hangs.py asks for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peers

from tests.helpers import hangs
from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_SECONDS = 30.0
SHORT_SECONDS = 3.0
LIMIT_SECONDS = 180.0


def drill(way: str, watch_seconds: float) -> tuple[float, list[str]]:
    """Run one; returns its seconds and what was wrong."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
    if watch_seconds != DEFAULT_SECONDS:
        settings["MPISPEED_WATCH_SECONDS"] = str(watch_seconds)
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(hangs.RANKS), "--run-dir", name]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [*command, str(hangs.WORKER), way], capture_output=True, text=True, check=False, cwd=ROOT,
                env={**os.environ, **settings}, timeout=LIMIT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return LIMIT_SECONDS, [f"it still ran after {LIMIT_SECONDS} s\n{late.stderr}"]
        seconds = time.monotonic() - begin
        return seconds, hangs.problems(way, done.returncode, done.stderr, Path(name), watch_seconds)


def main() -> int:
    """Run all, show each way's line; the exit code is 1 if one drill was not named right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=hangs.WAYS, default=hangs.WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for way in args.ways:
        drills = [drill(way, DEFAULT_SECONDS), *(drill(way, SHORT_SECONDS) for _ in range(args.times))]
        wrong = [problem for _, problems in drills for problem in problems[:1]]
        short = [seconds for seconds, _ in drills[1:]]
        right = sum(not problems for _, problems in drills)
        results[way] = {
            "named": right,
            "of": len(drills),
            "default_seconds": drills[0][0],
            "short_seconds": {"median": statistics.median(short), "max": max(short)} if short else {},
        }
        print(f"{way:8} {right} of {len(drills)} named; {drills[0][0]:.1f} s with the default limit", flush=True)
        for problem in wrong:
            print(f"  {problem}", flush=True)
    peers.write_record(args.json, "soak/drills", {"ranks": hangs.RANKS, "times": args.times}, results)
    return int(any(found["named"] != found["of"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
