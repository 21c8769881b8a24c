"""`make soak`: the kill test of tests/jobs with many more kills, under a seed of its own that is printed.

python tools/soak.py --kills 100 --seed 17
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = 3
"""New tags, tags that are overwritten, and a folder for every node."""


def main() -> int:
    """Run it; the exit code is that of pytest."""
    parser = argparse.ArgumentParser(description="Kill jobs while they save, again and again.")
    parser.add_argument("--kills", type=int, default=100, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; without it a new one is chosen")
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    kills = -(-options.kills // KINDS)
    print(f"{kills * KINDS} kills, --seed {seed}", flush=True)
    env = {**os.environ, "MPISPEED_SOAK_KILLS": str(kills), "MPISPEED_SOAK_SEED": str(seed)}
    words = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "tests/jobs/test_killed_save.py"]
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
