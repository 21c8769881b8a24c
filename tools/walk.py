"""The files of the package that one operation enters, by tracing calls: how far a reader has to walk.

    python tools/walk.py [--list] [--threads] [WALK ...]

Two ranks train a model of four blocks with clipping; after two updates that fill caches, one operation is traced on
rank 0 with `sys.setprofile`: in the thread that runs it and in those that it starts, with --threads also in those that
the engine has started before, which carry out started collectives. Walks: update2 (forward, backward and step at stage
2), update3 (stage 3), forward3 (the forward pass of stage 3), save and load (a checkpoint at stage 2). A file counts
once, however often it is entered. `docs/design/walks.md` explains the lists.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

WALKS = ("update2", "update3", "forward3", "save", "load")
WIDTH, BLOCKS, WARM, LIMIT_SECONDS = 32, 4, 2, 300
_BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = str(_BESIDE) if _BESIDE.exists() else "mpirun"
"""That of the environment's own MPI, if it has one."""


class Tracer:
    """Notes the files of functions that are called, in this thread and in those that start meanwhile.

    With `all_threads` also in those that start after this object was made.
    """

    def __init__(self, *, all_threads: bool) -> None:
        self._files: set[str] = set()
        self._is_on = False
        if all_threads:
            threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            self._files.add(frame.f_code.co_filename)

    def entered(self, run: Callable[[], object], package: Path) -> list[str]:
        """Paths below `package` of the files of all functions called while `run` runs."""
        self._files, self._is_on = set(), True
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._is_on = False
        files = map(Path, self._files.copy())
        return sorted(str(file.relative_to(package)) for file in files if file.is_relative_to(package))


def trained(walk: str) -> tuple[Any, Callable[[], Any], Callable[[], None]]:
    """An engine after some updates, its forward pass, and a whole update."""
    import torch
    from torch import nn

    import mpispeed

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    stage = 3 if walk.endswith("3") else 2
    engine, *_ = mpispeed.initialize(
        model=nn.Sequential(*layers),
        config={
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "steps_per_print": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )  # fmt: skip
    data = torch.ones(2, WIDTH, dtype=torch.bfloat16)

    def forward() -> Any:
        return engine(data).float().square().mean()

    def update() -> None:
        engine.backward(forward())
        engine.step()

    for _ in range(WARM):
        update()
    return engine, forward, update


def trace(walk: str, told: Path, folder: Path, *, all_threads: bool) -> None:
    """One rank: train, trace, and write the list on rank 0."""
    tracer = Tracer(all_threads=all_threads)  # before the engine starts threads
    from mpi4py import MPI

    import mpispeed

    engine, forward, update = trained(walk)
    if walk == "load":
        engine.save_checkpoint(str(folder), tag="walk")
    runs: dict[str, Callable[[], object]] = {
        "forward3": forward,
        "save": lambda: engine.save_checkpoint(str(folder), tag="walk"),
        "load": lambda: engine.load_checkpoint(str(folder)),
    }
    files = tracer.entered(runs.get(walk, update), Path(mpispeed.__file__).parent)
    if MPI.COMM_WORLD.rank == 0:
        told.write_text(json.dumps(files))
    engine.destroy()


def walked(walk: str, *flags: str) -> list[str]:
    """The files of one walk, from a job of two ranks."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        told = folder / "files.json"
        done = subprocess.run(
            [MPIRUN, "-n", "2", sys.executable, __file__, "--rank", walk, str(told), *flags],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "MPISPEED_RUN_DIR": str(folder / "run")},
            capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{walk} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        files: list[str] = json.loads(told.read_text())
        return files


def main() -> int:
    """Print the number of files of each walk, and the files with --list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=" ".join(WALKS))
    parser.add_argument("--list", action="store_true", help="the files too")
    parser.add_argument("--threads", action="store_true", help="with the threads that the engine has started before")
    parser.add_argument("--rank", nargs=2, metavar=("WALK", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        walk, told = chosen.rank
        trace(walk, Path(told), Path(told).parent / "saved", all_threads=chosen.threads)
        return 0
    for walk in chosen.walks or WALKS:
        files = walked(walk, *(["--threads"] if chosen.threads else []))
        print(f"{walk:10} {len(files):3} files", flush=True)
        if chosen.list:
            print("".join(f"    {name}\n" for name in files), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
