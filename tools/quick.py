"""`make quick`: in a few minutes, the tests nearest to what was changed, the rules, and a training on 2 ranks.

    python tools/quick.py                   against the last commit but one
    python tools/quick.py --since main      against another
    python tools/quick.py --list            only say what would run

A test is near if it imports what was changed; else by how many imports lie between. The nearest run first, as many as
fit into the time; what does not fit is said. Durations are those of tests/durations.json.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from run_tests import PYTEST, ROOT, Piece, kept_durations, run_all, say, summary

SECONDS = 220
"""On cores, for the tests that are chosen."""

UNKNOWN_SECONDS = 5.0
"""Of a file that no duration was kept of."""

SMOKE = ("tests/run_mpi.py", "-n", "2", "engine", "-k", "trains_as_the_optimizer_alone and FusedAdam")
FOLDERS = ("tests/unit", "tests/property")


def changed_since(base: str) -> list[str]:
    """Paths that differ from a commit, and files that git does not know yet."""
    asked = (["git", "diff", "--name-only", base, "--"], ["git", "ls-files", "--others", "--exclude-standard"])
    found: list[str] = []
    for command in asked:
        found += subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(set(found))


def module_of(path: Path) -> str:
    """src/mpispeed/zero.py -> mpispeed.zero; tests/zoo/models.py -> tests.zoo.models."""
    inner = path.relative_to(ROOT).with_suffix("")
    parts = inner.parts[1:] if inner.parts[0] == "src" else inner.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules that a file imports anywhere in it; of `from a import b` both a and a.b, as b may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def distances(changed: Iterable[str], sources: Mapping[str, Path]) -> dict[str, int]:
    """Module -> imports between it and a changed one; modules that reach none are not in it."""
    users: dict[str, list[str]] = defaultdict(list)
    for name, path in sources.items():
        for used in imports_of(path):
            if used in sources:
                users[used].append(name)
    found = {name: 0 for name in changed if name in sources}
    waiting = deque(found)
    while waiting:
        name = waiting.popleft()
        for user in users[name]:
            if user not in found:
                found[user] = found[name] + 1
                waiting.append(user)
    return found


def choose(changed: list[str], seconds: float) -> tuple[list[Path], list[Path]]:
    """Test files that run, the nearest first, and those that are near but do not fit into the time."""
    folders = ("src", "tests/helpers", "tests/zoo")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    sources = {module_of(path): path for path in files}
    touched = {module_of(ROOT / name) for name in changed if name.endswith(".py") and (ROOT / name).exists()}
    # what is compiled belongs to the room that imports it
    touched |= {"mpispeed.native.status" for name in changed if name.startswith(("cython/", "cuda/"))}
    away = distances(touched, sources)
    took = kept_durations("files")
    ranked: list[tuple[int, float, Path]] = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("test_*.py"):
            name = path.relative_to(ROOT).as_posix()
            near = [away[module] for module in imports_of(path) if module in away]
            if name in changed or near:
                ranked.append((0 if name in changed else 1 + min(near), took.get(name, UNKNOWN_SECONDS), path))
    chosen, left, used = [], [], 0.0
    for _, cost, path in sorted(ranked):
        if used + cost <= seconds:
            chosen.append(path)
            used += cost
        else:
            left.append(path)
    return chosen, left


def pieces_of(chosen: list[Path]) -> list[Piece]:
    """The rules, the training on two ranks, and a process for each folder, as in `make test`; the longest first."""
    took = kept_durations("files")
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in chosen:
        folders[path.parent].append(path)

    def cost(folder: Path) -> float:
        names = (path.relative_to(ROOT).as_posix() for path in folders[folder])
        return sum(took.get(name, UNKNOWN_SECONDS) for name in names)

    pieces = [Piece("smoke", "a training on 2 ranks", SMOKE, 2), Piece("rules", "rules", (*PYTEST, "tests/rules"))]
    for folder in sorted(folders, key=cost, reverse=True):
        name = folder.relative_to(ROOT / "tests").as_posix()
        pieces.append(Piece("unit", name, (*PYTEST, *map(str, sorted(folders[folder])))))
    return pieces


def main() -> int:
    """Run what was chosen; the last line is the total."""
    parser = argparse.ArgumentParser(description="Runs the tests nearest to what was changed.")
    parser.add_argument("--since", default="HEAD~1", metavar="COMMIT", help="what to compare with, HEAD~1 by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of cores for chosen tests, {SECONDS}")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="only say what would run")
    options = parser.parse_args()
    changed = changed_since(options.since)
    chosen, left = choose(changed, options.seconds)
    say(f"{len(changed)} files changed since {options.since}; {len(chosen)} files of tests are near")
    if left:
        say(f"{len(left)} more are near and do not fit into {options.seconds:.0f} s; `make test` runs them")
    if options.list:
        say("\n".join(path.relative_to(ROOT).as_posix() for path in chosen))
        return 0
    began = time.monotonic()
    results = run_all(pieces_of(chosen), options.cores, show=say)
    say(summary(results, time.monotonic() - began, kept={}))
    return int(any(result.counts["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
