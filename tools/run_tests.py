"""`make test`: plain tests, MPI tests on 1, 2, 3 and 4 ranks, tests of whole jobs, the package; then one total line."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "unit, property, rules": ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
    "MPI": ["tests/run_mpi.py"],
    "jobs": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/jobs"],
    "package": ["tools/check_package.py"],
}
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


def run_part(name: str, words: list[str]) -> tuple[dict[str, int], bool]:
    """Run one part, show its output as it comes; returns the counts of its last line and whether it failed."""
    print(f"=== {name}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = ""
    for line in process.stdout or ():
        sys.stdout.write(line)
        sys.stdout.flush()
        last = line if line.strip() else last
    has_failed = process.wait() != 0
    print(f"=== {name}: {time.monotonic() - began:.0f} s", flush=True)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for number, kind in COUNT.findall(last):
        counts["failed" if kind.startswith("error") else kind] += int(number)
    if has_failed and not counts["failed"]:
        counts["failed"] = 1  # it ended before it could count
    return counts, has_failed


def main() -> int:
    """Run all parts, also after a failure, so that one call shows everything."""
    results = [run_part(name, words) for name, words in PARTS.items()]
    total = {kind: sum(counts[kind] for counts, _ in results) for kind in ("passed", "failed", "skipped")}
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {total['failed']} failed{skipped}", flush=True)
    return int(any(has_failed for _, has_failed in results))


if __name__ == "__main__":
    sys.exit(main())
