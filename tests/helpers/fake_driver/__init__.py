"""pycuda built for tests without a GPU, and a driver for it that runs kernels on the host."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from mpispeed.native.cuda import toolchain
from tests.helpers.system import cannot

VERSION = "2026.1"
NEEDS = ("pytools", "siphash24", "mako", "MarkupSafe", "platformdirs", "typing-extensions")
DRIVER = Path(__file__).parent / "fake_libcuda.c"
# Optimized is three times as slow to build, and nothing here is timed.
SETTINGS = """\
CUDA_ROOT = {root!r}
CUDADRV_LIB_DIR = [{stub!r}]
CUDA_ENABLE_CURAND = False
CXXFLAGS = ["-g0", "-O0"]
LDFLAGS = ["-Wl,--no-as-needed", "-Wl,-s"]
"""


def built() -> tuple[Path, Path]:
    """(folder of packages with pycuda, folder of the driver); built once for each Python and user, and each driver."""
    key = hashlib.sha256(f"{VERSION} {sys.version}".encode()).hexdigest()[:12]
    home = Path(tempfile.gettempdir()) / f"mpispeed-pycuda-{os.getuid()}-{key}"
    home.mkdir(mode=0o700, exist_ok=True)
    assert home.lstat().st_uid == os.getuid()
    site = home / "site"
    driver = home / f"driver-{hashlib.sha256(DRIVER.read_bytes()).hexdigest()[:12]}"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "done").exists():
            _build_pycuda(home, site)
            (home / "done").touch()
        if not (driver / "done").exists():
            _build_driver(site, driver)
            (driver / "done").touch()
    return site, driver


def _build_pycuda(home: Path, site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    _run([*pip, "install", "--upgrade", "--target", str(site), *NEEDS])
    with tempfile.TemporaryDirectory(dir=home) as place:
        source = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "pycuda", "-d", place]
        _run([*pip, *source, f"pycuda=={VERSION}"], {"PYTHONPATH": str(site)})
        with tarfile.open(next(Path(place).glob("pycuda-*.tar.gz"))) as archive:
            archive.extractall(place, filter="data")
        tree, stub = Path(place) / f"pycuda-{VERSION}", Path(place) / "stub"
        stub.mkdir()
        (stub / "stub.c").write_text("int mpispeed_stub;\n")
        _run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{stub}/libcuda.so", str(stub / "stub.c")])
        (tree / "siteconf.py").write_text(SETTINGS.format(root=str(_toolkit()), stub=str(stub)))
        command = [*pip, "install", "--no-deps", "--no-build-isolation", "--target", str(site), str(tree)]
        _run(command, {"PYTHONPATH": str(site), "CFLAGS": "-O0 -g0"})


def _build_driver(site: Path, folder: Path) -> None:
    """All functions that pycuda links: those of the source, and for the others one that does nothing."""
    module = next((site / "pycuda").glob("_driver*.so"))
    wanted = set(_symbols("--undefined-only", module))
    folder.mkdir(exist_ok=True)
    own = folder / "own.o"
    _run(["gcc", "-O1", "-fPIC", "-Wall", "-Werror", "-c", str(DRIVER), "-o", str(own)])
    rest = sorted(wanted - set(_symbols("--defined-only", own, is_dynamic=False)))
    (folder / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    library = str(folder / "libcuda.so.1")
    words = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, str(own), str(folder / "rest.c")]
    _run([*words, "-ldl"])


def _symbols(which: str, path: Path, *, is_dynamic: bool = True) -> list[str]:
    command = ["nm", *(["-D"] if is_dynamic else []), which, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [word for line in said.splitlines() for word in line.split()[-1:] if word.startswith("cu")]


def _toolkit() -> Path:
    """The folder with include/cuda.h."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places.append(str(toolchain.find_nvcc().resolve().parents[1]))
    for place in places:
        if place and (Path(place) / "include" / "cuda.h").is_file():
            return Path(place)
    return Path(cannot(f"no cuda.h in {places}: pycuda cannot be built"))


def _run(command: list[str], more: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(more or {})})
    if done.returncode:
        cannot(f"{' '.join(command)} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
