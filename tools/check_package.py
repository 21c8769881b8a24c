"""Builds the sdist and a wheel out of it, and checks the wheel: contents, assets, a run on two ranks elsewhere.

With --keep FOLDER both archives stay there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = """
import os
import sys
from pathlib import Path
import torch
import mpispeed
from mpispeed import mesh
assert Path(mpispeed.__file__).is_relative_to(sys.argv[1]), mpispeed.__file__
world = mesh.start()
x = torch.full((5,), float(world.rank + 1))
world.comm.all_reduce(x)
assert x.tolist() == [3.0] * 5, x
os.write(1, f"sum over ranks: {x[0].item()}\\n".encode())
"""
ASSETS = """
import sys
from pathlib import Path
from mpispeed.base import assets
for kind in ("cuda", "slurm"):
    folder = assets.folder(kind)
    assert folder.is_relative_to(sys.argv[1]) and any(folder.rglob("*.*")), folder
"""


def build(folder: Path) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel comes out of the sdist, so a file missing there shows."""
    code = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, str(folder)], ROOT)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older patch releases know no filters
        archive.extractall(folder / "source")
    source = next((folder / "source").iterdir())
    words = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run([sys.executable, "-m", "pip", "wheel", *words, str(source)], folder)
    return sdist, next(folder.glob("*.whl"))


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command in `folder` and return its output; its failure is an error that shows the output."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        msg = f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{done.stdout}"
        raise RuntimeError(msg)
    return done.stdout


def contents(wheel: Path) -> None:
    """Every module, stub, kernel and template is in; no source of a compiled module is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/mpispeed").rglob("*.py")}
    wanted |= {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/mpispeed").rglob("*.pyi")}
    wanted |= {f"mpispeed/_{path.relative_to(ROOT)}" for path in (ROOT / "cuda").rglob("*.cu*")}
    wanted |= {f"mpispeed/_{path.relative_to(ROOT)}" for path in (ROOT / "slurm").rglob("*.*")}
    wanted.add("mpispeed/py.typed")
    missing = sorted(wanted - names)
    compiled = {Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
    sources = {path.stem for path in (ROOT / "cython").rglob("*.pyx")}
    foreign = sorted(name for name in names if name.endswith((".pyx", ".c", ".h")) and "_cuda/" not in name)
    foreign += sorted(name for name in names if not name.startswith("mpispeed"))
    if missing or foreign or compiled != sources:
        msg = f"missing: {missing}; not expected: {foreign}; compiled {sorted(compiled)} of {sorted(sources)}"
        raise RuntimeError(msg)


def is_found(site: Path) -> None:
    """The locator finds kernels and templates inside the unpacked wheel."""
    run([sys.executable, "-c", ASSETS, str(site)], site, PYTHONPATH=str(site))


def joins(site: Path) -> None:
    """Two ranks of the installed package add a tensor."""
    script = site.parent / "sums.py"
    script.write_text(SUMS)
    command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", "2", str(script), str(site)]
    answer = run(command, site.parent, PYTHONPATH=str(site))
    if answer.count("sum over ranks: 3.0") != 2:
        msg = f"two ranks were to report 3.0, the answer was:\n{answer}"
        raise RuntimeError(msg)


def main() -> int:
    """Build, check, count."""
    parser = argparse.ArgumentParser(description="Builds and checks the package.")
    parser.add_argument("--keep", type=Path, help="folder for the archives")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpispeed-package-") as scratch:
        folder = Path(scratch)
        try:
            sdist, wheel = build(folder)
        except RuntimeError as error:
            print(f"FAILED build: {error}\n0 passed, 1 failed")
            return 1
        site = folder / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        checks: dict[str, Callable[[], None]] = {
            "contents": lambda: contents(wheel),
            "assets": lambda: is_found(site),
            "two ranks": lambda: joins(site),
        }
        failed = 0
        for name, check in checks.items():
            try:
                check()
            except RuntimeError as error:
                failed += 1
                print(f"FAILED {name}: {error}")
            else:
                print(f"ok {name}")
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                print(shutil.copy(path, options.keep))
    print(f"{len(checks) + 1 - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
