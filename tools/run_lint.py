"""`make lint`: every check, also after a failure, with one line for each at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTHON_TREES = ["src", "tests", "tools", "benchmarks", "docs", "setup.py"]
CHECKS = {
    "ruff": ["ruff", "check", *PYTHON_TREES],
    "format": ["ruff", "format", "--check", *PYTHON_TREES],
    "floors": ["lint-imports"],
    "types": ["mypy"],
    "stubs": ["stubtest", "--ignore-missing-stub", "--allowlist", "tools/stubtest.txt"],
    "spelling": ["codespell", "src", "tests", "tools", "benchmarks", "docs", "cython", "cuda", "slurm"],
    "cython": ["cython-lint", "cython"],
}


def native_modules() -> list[str]:
    """Compiled modules that have a stub."""
    return [f"mpispeed._native.{stub.stem}" for stub in sorted((ROOT / "src/mpispeed/_native").glob("*.pyi"))]


def shell_checks() -> dict[str, list[str]]:
    """Syntax of the shell scripts; string templates are checked after filling, by a test."""
    return {f"shell {path}": ["/bin/bash", "-n", path] for path in (".ci/run",)}


def main() -> int:
    """Run the checks one after the other."""
    commands = {name: [str(BIN / words[0]), *words[1:]] for name, words in CHECKS.items()}
    commands["stubs"] += native_modules()
    commands.update(shell_checks())
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # cython-lint starts pycodestyle
    lines, has_failed = [], False
    for name, words in commands.items():
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            has_failed = True
            print(f"=== {name}\n{done.stdout}", flush=True)
        verdict = "FAILED" if done.returncode else "ok"
        lines.append(f"{name:16} {verdict:6} {time.monotonic() - began:6.1f} s")
    print("\n".join(lines))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
