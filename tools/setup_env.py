"""Makes the virtual environment that `make` works in: packages at pinned versions, an MPI, the compiled modules.

Needs only a Python and a C compiler, and says in one line what is missing. A second call finds the
stamps of the first and returns at once. The syntax is that of Python 3.8 on purpose: an old interpreter
has to get as far as the message.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
# Each purpose contains the ones before it.
_TEST = ["monitor", "wandb", "comet", "test", "docs"]
EXTRAS = {"demo": ["monitor"], "test": _TEST, "lint": [*_TEST, "dev"]}
BUILD_TOOLS = ["setuptools", "wheel", "Cython"]


class Unable(Exception):
    """The environment cannot be made; the message is the one line to show."""


def check_interpreter() -> None:
    """Refuse a Python that is too old or comes without venv or its C headers."""
    found = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST))
    if sys.version_info < OLDEST:
        msg = f"Python {oldest} or newer is needed, {sys.executable} is {found}; choose another with PYTHON="
        raise Unable(msg)
    try:
        import ensurepip  # noqa: F401  only its presence matters: Debian ships it apart
        import venv  # noqa: F401
    except ImportError as missing:
        msg = f"{sys.executable} has no module {missing.name}; install it (Debian: apt-get install python3-venv)"
        raise Unable(msg) from None
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        msg = f"{header} is missing; install the headers of Python (Debian: apt-get install python3-dev)"
        raise Unable(msg)


def check_compiler() -> None:
    """Refuse a machine without a C compiler."""
    name = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(name):
        msg = f"no C compiler: {name} is not on PATH; install one (Debian: apt-get install gcc libc6-dev) or set CC="
        raise Unable(msg)


def check_mpi(mpi: str) -> None:
    """Refuse an unknown choice, and `site` where the site has no MPI."""
    if mpi not in ("wheel", "site"):
        msg = f"MPI={mpi} is unknown; MPI=wheel installs one from a wheel, MPI=site uses the mpirun on PATH"
        raise Unable(msg)
    if mpi == "site" and not shutil.which("mpirun"):
        msg = "MPI=site was asked for, but no mpirun is on PATH; load your site's MPI module, or leave MPI= out"
        raise Unable(msg)


def digest(paths: list[Path], *words: str) -> str:
    """Hash of the words and of the files' names and contents."""
    total = hashlib.sha256("\0".join(words).encode())
    for path in sorted(paths):
        total.update(str(path.relative_to(ROOT)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def run(command: list[str], what: str) -> None:
    """Run a command; on failure show its output and say in one line what failed."""
    done = subprocess.run(command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        msg = f"{what} failed with exit code {done.returncode}; its output stands above"
        raise Unable(msg)


def has_nvcc() -> bool:
    """True if there is a CUDA compiler where the package looks for one."""
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    found = shutil.which("nvcc") or any(Path(home, "bin", "nvcc").is_file() for home in homes if home)
    return bool(found or os.environ.get("MPISPEED_NVCC"))


class Environment:
    """One virtual environment and the stamps that say what is in it."""

    def __init__(
        self,
        folder: Path,
        purpose: str,
        mpi: str,
        torch_index: str,
        torch_version: str = "",
        takes_newest: bool = False,
    ) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.purpose = purpose
        self.mpi = mpi
        self.torch_index = torch_index
        self.torch_version = torch_version
        self.takes_newest = takes_newest
        self.extras = EXTRAS[purpose] + (["mpich"] if mpi == "wheel" else [])
        # Tests compile the CUDA kernels, with or without a GPU; demo and the run on another torch do not need them.
        needs_kernels = "test" in self.extras and not torch_version and not takes_newest
        self.extras += ["kernels"] if needs_kernels and not has_nvcc() else []
        settings = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
        sources = [path for path in (ROOT / "cython").rglob("*") if path.suffix in (".pyx", ".pxd", ".h", ".c")]
        # The interpreter is part of both: another Python needs other wheels and other compiled modules.
        self.packages_key = digest(settings, mpi, torch_index, torch_version, str(takes_newest), sys.version)
        self.compiled_key = digest(
            [*settings, ROOT / "setup.py", *sources],
            sys.version,
            os.environ.get("CC", ""),
            os.environ.get("CFLAGS", ""),
        )

    def pip(self, *words: str) -> list[str]:
        """The install command of the environment, with the pinned versions, or with the newest that fit together."""
        pins = ["--upgrade"] if self.takes_newest else ["-c", str(self.constraints())]
        return [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, *words]

    def constraints(self) -> Path:
        """The file of pinned versions; one of this environment if its torch is another."""
        pinned = ROOT / "constraints.txt"
        if not self.torch_version:
            return pinned
        changed, pin = self.folder / "constraints.txt", f"torch=={self.torch_version}"
        changed.write_text(re.sub(r"^torch==\S+", pin, pinned.read_text(), flags=re.MULTILINE))
        return changed

    def has_packages(self) -> bool:
        """True if the packages of this purpose, or of one that contains it, are in."""
        stamp = self.folder / "stamp-packages"
        key, _, purpose = stamp.read_text().partition(" ") if stamp.is_file() else ("", "", "")
        order = list(EXTRAS)
        return key == self.packages_key and purpose in order[order.index(self.purpose) :]

    def is_compiled(self) -> bool:
        """True if the compiled modules come from the sources that are there now."""
        stamp = self.folder / "stamp-compiled"
        return stamp.is_file() and stamp.read_text() == self.compiled_key

    def create(self) -> None:
        """Make the environment where there is none, or only a broken or an old one."""
        probe = f"import pip, sys; sys.exit(sys.version_info < {OLDEST})"
        if self.python.exists():
            done = subprocess.run([str(self.python), "-c", probe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                return
        say(f"making the environment {self.folder} with Python {sys.version.split()[0]}")
        run([sys.executable, "-m", "venv", "--clear", str(self.folder)], "making the virtual environment")

    def install(self) -> None:
        """Install torch, the other packages, and this package with its compiled modules."""
        say(f"installing packages ({', '.join(self.extras)}); the first time this takes a few minutes")
        run(self.pip(*BUILD_TOOLS), "installing the build tools")
        if self.torch_index:
            say(f"torch comes from {self.torch_index}")
            pin = re.search(r"^torch==\S+", self.constraints().read_text(), re.MULTILINE)
            torch = pin.group(0) if pin and not self.takes_newest else "torch"
            run(self.pip("--no-deps", "--index-url", self.torch_index, torch), "installing torch")
        run(self.pip("--no-build-isolation", "-e", f".[{','.join(self.extras)}]"), "installing the packages")
        if "test" in self.extras:
            # Alone, and PyYAML comes with others: torchvision would have to be a build for the same torch.
            run(self.pip("--no-build-isolation", "--no-deps", "mup"), "installing mup")
        if self.mpi == "site":
            # The wheel's mpirun would be found before the site's.
            run([str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", "mpich"], "removing the MPI wheel")
        (self.folder / "stamp-packages").write_text(f"{self.packages_key} {self.purpose}")
        (self.folder / "stamp-compiled").write_text(self.compiled_key)

    def compile(self) -> None:
        """Build the compiled modules again after a change of their sources."""
        say("compiling the Cython modules")
        run(self.pip("--no-build-isolation", "--no-deps", "-e", "."), "compiling")
        (self.folder / "stamp-compiled").write_text(self.compiled_key)

    def bring_up(self) -> bool:
        """Do what is missing; returns True if there was anything to do."""
        if self.python.exists() and self.has_packages() and self.is_compiled():
            return False
        check_compiler()
        self.create()
        if not self.has_packages():
            self.install()
        elif not self.is_compiled():
            self.compile()
        return True


def say(text: str) -> None:
    """One line of progress."""
    print(f"[setup] {text}", flush=True)


def main() -> int:
    """Parse the arguments of `make`, bring the environment up, report in a line."""
    parser = argparse.ArgumentParser(description="Makes the virtual environment that `make` works in.")
    parser.add_argument("purpose", choices=list(EXTRAS))
    parser.add_argument("--venv", default=".venv", help="folder of the virtual environment")
    parser.add_argument("--mpi", default="wheel", help="wheel or site")
    parser.add_argument("--torch-index", default="", help="package index for torch alone")
    parser.add_argument("--torch-version", default="", help="version of torch in place of the pinned one")
    parser.add_argument("--newest", action="store_true", help="the newest versions that pip finds, no pinned ones")
    options = parser.parse_args()
    try:
        check_interpreter()
        check_mpi(options.mpi)
        folder, settings = (
            ROOT / options.venv,
            (options.mpi, options.torch_index, options.torch_version, options.newest),
        )
        environment = Environment(folder, options.purpose, *settings)
        if environment.bring_up():
            say(f"ready: {environment.python}")
    except Unable as reason:
        sys.stderr.write(f"setup: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
