"""`make mpis`: collectives, a training and a job of `mpispeed run` with MPICH, with the mpirun on PATH, with Intel MPI.

    python tools/try_mpis.py                    all that are there
    python tools/try_mpis.py mpich intel        some

MPICH is the wheel beside this Python. Intel MPI comes from PyPI (impi-rt) into an environment of its own, which shares
the packages of this one. The mpirun on PATH is that of the system, such as Debian's Open MPI. One that is not there is
said, and fails unless it was not named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTEL = "impi-rt"
LIMIT_SECONDS = 900

JOB = """
import torch
from torch import nn
import mpispeed
from mpi4py import MPI
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 4,
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine = mpispeed.initialize(model=nn.Linear(6, 2), config=config)[0]
for step in range(3):
    loss = engine(torch.full((4, 6), float(step + 1))).square().mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint("saved", tag="t")
if engine.global_rank == 0:
    print("WORLD", engine.world_size, MPI.Get_library_version().splitlines()[0], flush=True)
"""


class Missing(Exception):
    """An MPI that this machine does not have; the message says how to get it."""


@dataclass
class Trial:
    """An MPI: the Python that runs with it, the option of `mpispeed run` that chooses it, and variables."""

    name: str
    python: str
    mpi: str = "auto"
    variables: dict[str, str] = field(default_factory=dict)

    def commands(self, folder: Path) -> list[tuple[str, list[str]]]:
        """What is run, with a name for each."""
        (folder / "job.py").write_text(JOB)
        tests = [self.python, str(ROOT / "tests/run_mpi.py"), "--mpi", self.mpi]
        run = [self.python, "-m", "mpispeed", "run", "--mpi", self.mpi, "-n"]
        return [
            ("job on 2 ranks", [*run, "2", "job.py"]),
            ("job on 3 ranks", [*run, "3", "job.py"]),
            ("collectives", [*tests, "-n", "2,3", "mesh", "-k", "sum or all_reduce or broadcast or gather"]),
            ("training", [*tests, "-n", "2", "engine", "-k", "trains_as_the_optimizer_alone and FusedAdam"]),
            ("checkpoints", [*tests, "-n", "1,3", "engine", "-k", "test_releases"]),
        ]


def mpich() -> Trial:
    """The wheel beside this Python."""
    if not Path(sys.executable).with_name("mpirun").exists():
        msg = 'no mpirun beside this Python: pip install "mpispeed[mpich]"'
        raise Missing(msg)
    return Trial("mpich", sys.executable)


def site() -> Trial:
    """The mpirun on PATH."""
    beside = Path(sys.executable).parent.resolve()
    folders = [name for name in os.environ.get("PATH", "").split(os.pathsep) if Path(name).resolve() != beside]
    if shutil.which("mpirun", path=os.pathsep.join(folders)) is None:
        msg = "no other mpirun is on PATH: load a module, or install openmpi-bin"
        raise Missing(msg)
    return Trial("site", sys.executable, "site")


def intel(folder: Path) -> Trial:
    """Intel MPI's wheel in an environment that sees the packages of this one."""
    python = folder / "bin" / "python"
    library = folder / "lib" / "libmpi.so.12"
    if not library.exists():
        steps = (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", INTEL],
        )
        for words in steps:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                msg = f"{' '.join(words[:6])} failed: {done.stderr.strip()[-300:]}"
                raise Missing(msg)
    packages = Path(sysconfig.get_path("purelib"))
    own = next((folder / "lib").glob("python3*/site-packages"))
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    variables = {"MPI4PY_LIBMPI": str(library), "I_MPI_ROOT": str(folder), "I_MPI_FABRICS": "shm"}
    return Trial("intel", str(python), variables=variables)


def attempt(trial: Trial) -> bool:
    """Run all commands of an MPI; True if all end well."""
    is_good = True
    with tempfile.TemporaryDirectory(prefix=f"mpispeed-{trial.name}-") as folder:
        for name, words in trial.commands(Path(folder)):
            began = time.monotonic()
            environ = {**os.environ, **trial.variables, "OMP_NUM_THREADS": "1", "MPISPEED_DEVICE": "cpu"}
            try:
                done = subprocess.run(
                    words, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
                )
                code, output = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as late:
                code, output = 124, f"{late.stdout or b''!s}"
            said = next((line for line in output.splitlines() if line.startswith("WORLD")), "")
            if name.startswith("job") and not said.startswith(f"WORLD {words[words.index('-n') + 1]} "):
                code = code or 1
            last = said or (output.strip().splitlines() or [""])[-1]
            verdict, seconds = "FAIL" if code else "ok", time.monotonic() - began
            print(f"{verdict:5} {trial.name:6} {name:16} {seconds:6.1f} s  {last}", flush=True)
            if code:
                print("\n".join(output.splitlines()[-40:]), flush=True)
            is_good &= not code
    return is_good


def main() -> int:
    """Try the MPIs that are asked for, or all."""
    parser = argparse.ArgumentParser(description="Tries several MPIs.")
    parser.add_argument("mpis", nargs="*", help="mpich, site, intel; all by default")
    parser.add_argument("--venv", default=".venv-intel", help="environment of Intel MPI")
    options = parser.parse_args()
    makers = {"mpich": mpich, "site": site, "intel": lambda: intel((ROOT / options.venv).absolute())}
    strange = set(options.mpis) - set(makers)
    if strange:
        parser.error(f"{', '.join(sorted(strange))}: choose among {', '.join(makers)}")
    is_good = True
    for name in options.mpis or makers:
        try:
            is_good &= attempt(makers[name]())
        except Missing as reason:
            print(f"{'FAIL' if options.mpis else '-':5} {name:6} not there: {reason}", flush=True)
            is_good &= not options.mpis
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
