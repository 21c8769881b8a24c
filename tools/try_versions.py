"""Quick tests and a training, for `make oldest` and `make newest`: in the environment of the Python that runs this.

    .venv-newest/bin/python tools/try_versions.py

What depends on versions of other packages: the rules, the config, the launcher, checkpoints, records and files of
earlier releases, optimizers, and trainings on 2 ranks. Says first which versions it runs with.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time

from run_tests import PYTEST, Piece, run_all, say, summary

PACKAGES = ("torch", "numpy", "mpi4py", "mpich", "h5py", "pydantic", "click", "transformers", "accelerate", "pytest")
UNIT = (
    "tests/unit/config", "tests/unit/launch", "tests/unit/releases", "tests/unit/record", "tests/unit/tokens",
    "tests/unit/optim", "tests/unit/ckpt/test_round_trip.py", "tests/property",
)  # fmt: skip
TRAINING = (
    ("a training on 2 ranks", ("-n", "2", "engine", "-k", "trains_as_the_optimizer_alone and FusedAdam")),
    ("checkpoints on 2 ranks", ("-n", "2", "engine", "-k", "test_releases or test_resume")),
    ("communicators on 2 ranks", ("-n", "2", "mesh", "-k", "sum or all_reduce or broadcast")),
)


def pieces() -> list[Piece]:
    """One process for each part."""
    found = [Piece("smoke", name, ("tests/run_mpi.py", *words), 2) for name, words in TRAINING]
    return [*found, *(Piece("unit", name, (*PYTEST, name)) for name in UNIT)]


def versions() -> str:
    """What this environment has of the packages that matter."""
    there = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            there[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in there.items())


def main() -> int:
    """Run all parts; the last line is the total."""
    say(versions())
    began = time.monotonic()
    results = run_all(pieces(), 2, show=say)
    say(summary(results, time.monotonic() - began, kept={}))
    return int(any(result.counts["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
