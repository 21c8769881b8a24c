"""Whether two commits train alike, bit by bit, and whether the new one goes on from checkpoints of the old one.

    python tools/same_bits.py OLD NEW [CASE ...]

Both commits get a git worktree of their own and are built there. For each case the old one trains on two ranks, saves,
and trains on; the new one trains from the start, and then from that checkpoint. Losses, gradient norms and checksums of
the weights have to be the same bits. Threads are fixed at one a rank. Nothing is compared between machines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = Path(__file__).with_name("same_bits_job.py")
CASES = ("stage0", "stage1", "stage2", "stage3", "offload", "pipeline", "slices", "onebit")
LIMIT_SECONDS = 600
_BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = str(_BESIDE) if _BESIDE.exists() else "mpirun"
"""That of the environment's own MPI, if it has one."""


def build(commit: str, folder: Path, like: Path | None = None) -> Path:
    """A worktree of `commit` with its compiled modules; the folder to put on PYTHONPATH.

    `like` is a tree that is built already: its modules are taken if they have the same sources.
    """
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(folder), commit], cwd=ROOT, check=True)
    if like is not None and sources_of(like) == sources_of(folder):
        for module in like.glob("src/mpispeed/_native/*.so"):
            shutil.copy(module, folder / "src/mpispeed/_native")
        return folder / "src"
    built = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        sys.exit(f"{commit} cannot be built:\n{built.stdout}{built.stderr}")
    return folder / "src"


def sources_of(tree: Path) -> str:
    """What git says of the sources of compiled modules."""
    listed = subprocess.run(
        ["git", "ls-tree", "HEAD", "cython", "setup.py"], cwd=tree, capture_output=True, text=True, check=True
    )
    return listed.stdout


def train(source: Path, case: str, saved: Path, swap: Path, *, resumes: bool) -> list[list[str]]:
    """Hexadecimal results of each step, from the start and saving, or from what was saved; [] if the job failed."""
    swap.mkdir(exist_ok=True)
    told = saved / f"{'resumed' if resumes else source.parent.name}.json"
    environment = {
        **os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MPISPEED_RUN_DIR": str(saved / "run"),
    }  # fmt: skip
    words = [case, str(saved), str(swap), str(told), *(["--resume"] if resumes else [])]
    done = subprocess.run(
        [MPIRUN, "-n", "2", sys.executable, str(JOB), *words],
        cwd=saved, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"{case} with {source} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return []
    rows: list[list[str]] = json.loads(told.read_text())
    return rows


def first_difference(expected: list[list[str]], found: list[list[str]]) -> str:
    """The first step that differs, in words; "" if none does."""
    if not expected or len(expected) != len(found):
        return f"{len(found)} steps in place of {len(expected)}"
    for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if wanted != got:
            return f"step {step} gives {' '.join(got)} in place of {' '.join(wanted)}"
    return ""


def compare(case: str, sources: Mapping[str, Path], folder: Path) -> bool:
    """Run one case and print its row; True if all bits are the same."""
    saved = {}
    for name in ("old", "new"):
        saved[name] = folder / case / name
        saved[name].mkdir(parents=True)
    swap = folder / case / "swap"
    old = train(sources["old"], case, saved["old"], swap, resumes=False)
    new = train(sources["new"], case, saved["new"], swap, resumes=False)
    further = old[len(old) - 20 :]
    resumed = train(sources["new"], case, saved["old"], swap, resumes=True)
    problems = {
        "from the start": first_difference(old, new),
        "from the old checkpoint": first_difference(further, resumed),
    }
    for what, problem in problems.items():
        told = problem or f"{len(old) if what == 'from the start' else len(further)} steps, the same bits"
        print(f"{case:10} {what:24} {told}", flush=True)
    return not any(problems.values())


def main() -> int:
    """Build both commits and compare them case by case."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    old, new, *cases = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        try:
            sources = {"old": build(old, folder / "old-tree"), "new": Path()}
            sources["new"] = build(new, folder / "new-tree", sources["old"].parent)
            same = [compare(case, sources, folder / "runs") for case in cases or CASES]
        finally:
            for tree in ("old-tree", "new-tree"):
                subprocess.run(["git", "worktree", "remove", "--force", str(folder / tree)], cwd=ROOT, check=False)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
