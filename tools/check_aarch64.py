"""`make aarch64`: the compiled modules by a cross compiler, and their tests of numpy alone under qemu-user.

    python tools/check_aarch64.py [--folder build/aarch64] [--native FOLDER]

Python for arm64 and its headers come from Debian (apt with a state of its own: nothing is installed on this machine),
numpy from its wheel. The digests of what the loops give there are compared with those of the modules built here. torch
is not tried, and so not `launch`, which imports it: it has to compile.
Needs gcc-aarch64-linux-gnu, qemu-user, apt and dpkg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALLS = ROOT / "tests" / "helpers" / "native_calls.py"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROGRAMS = {COMPILER: "gcc-aarch64-linux-gnu", EMULATOR: "qemu-user", "apt-get": "apt", "dpkg-deb": "dpkg"}
PACKAGES = ("python3-dev", "python3-minimal", "libpython3-dev", "libgomp1", "libstdc++6", "zlib1g")
CLOSE = 1e-6
"""Relative bound of what rests on the C library's exp and erf, whose last bits it does not promise."""


class Failed(Exception):
    """The check cannot go on; the message is what to show."""


def run(words: list[str], log: Path, **variables: str) -> str:
    """The output of a command, which is also added to `log`; its failure is an error with the last lines."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    with log.open("a") as file:
        file.write(f"$ {' '.join(words)}\n{done.stdout}\n")
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        msg = f"{' '.join(words[:4])} ... ended with {done.returncode}; everything is in {log}:\n{last}"
        raise Failed(msg)
    return done.stdout


def fetch(folder: Path, log: Path) -> tuple[Path, str]:
    """(root of an arm64 Debian with Python and numpy, Python's version); what is there already is kept."""
    root, apt = folder / "root", folder / "apt"
    if not (root / "done").exists():
        for name in ("lists/partial", "archives/partial"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        settings = apt / "apt.conf"
        settings.write_text(
            f'APT::Architecture "arm64"; APT::Architectures {{"arm64";}}; Dir::State "{apt}";\n'
            f'Dir::State::status "{apt}/status"; Dir::Cache "{apt}"; Debug::NoLocking "1";\n'
        )
        run(["apt-get", "update"], log, APT_CONFIG=str(settings))
        words = ["apt-get", "install", "-y", "--no-install-recommends", "--download-only", *PACKAGES]
        run(words, log, APT_CONFIG=str(settings))
        for archive in sorted((apt / "archives").glob("*.deb")):
            run(["dpkg-deb", "-x", str(archive), str(root)], log)
    version = max((root / "usr/include").glob("python3.*")).name.removeprefix("python")
    if not (root / "done").exists():
        import numpy

        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        words += ["--implementation", "cp", "--python-version", version, "--target", str(root / "site")]
        for glibc in ("manylinux_2_28", "manylinux_2_27", "manylinux2014"):
            words += ["--platform", f"{glibc}_aarch64"]
        run([*words, f"numpy=={numpy.__version__}"], log)
        (root / "done").touch()
    return root, version


def build(folder: Path, root: Path, version: str, log: Path) -> Path:
    """The folder of the modules for aarch64."""
    target = folder / "modules"
    shutil.rmtree(target, ignore_errors=True)
    include = root / "usr/include"
    run(
        [sys.executable, "setup.py", "build_ext", "-f", "-b", str(target), "-t", str(folder / "objects")],
        log,
        CC=f"{COMPILER} -I{include}/python{version} -I{include}",
        LDSHARED=f"{COMPILER} -shared",
        SETUPTOOLS_EXT_SUFFIX=f".cpython-{version.replace('.', '')}-aarch64-linux-gnu.so",
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )
    return target


def emulated(root: Path, version: str, modules: Path, log: Path) -> dict[str, str | list[float]]:
    """What the calls give under the emulator."""
    words = [EMULATOR, "-L", str(root), str(root / f"usr/bin/python{version}"), str(CALLS), str(modules)]
    told = run(words, log, PYTHONHOME=str(root / "usr"), PYTHONPATH=str(root / "site"))
    found: dict[str, str | list[float]] = json.loads(told.splitlines()[-1])
    return found


def differences(here: dict[str, str | list[float]], there: dict[str, str | list[float]]) -> list[str]:
    """A line for each case that differs."""
    lines = [f"{name}: only on one of the two" for name in sorted(here.keys() ^ there.keys())]
    for name in sorted(here.keys() & there.keys()):
        ours, theirs = here[name], there[name]
        if isinstance(ours, str) or isinstance(theirs, str):
            if ours != theirs:
                lines.append(f"{name}: other bytes than on this machine")
        elif not all(math.isclose(x, y, rel_tol=CLOSE, abs_tol=CLOSE) for x, y in zip(ours, theirs, strict=True)):
            lines.append(f"{name}: further than {CLOSE} from this machine's")
    return lines


def check(folder: Path, native: Path) -> int:
    """Fetch, build, run, compare; the number of cases that differ."""
    if missing := [f"{name} (Debian: {package})" for name, package in PROGRAMS.items() if not shutil.which(name)]:
        msg = f"not on PATH: {', '.join(missing)}; install these packages"
        raise Failed(msg)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    log.write_text("")
    root, version = fetch(folder, log)
    began = time.monotonic()
    modules = build(folder, root, version, log)
    files = sorted(modules.rglob("*.so"))
    seconds = time.monotonic() - began
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{len(files)} modules for aarch64, Python {version}: {size:.1f} MB in {seconds:.0f} s", flush=True)
    began = time.monotonic()
    there = emulated(root, version, modules, log)
    print(f"{len(there)} groups of calls under {EMULATOR} in {time.monotonic() - began:.0f} s", flush=True)
    here = json.loads(run([sys.executable, str(CALLS), str(native)], log).splitlines()[-1])
    found = differences(here, there)
    print("\n".join(found) or f"all {len(here)} groups give what they give on {sysconfig.get_platform()}")
    return len(found)


def main() -> int:
    """Read the command line, check."""
    parser = argparse.ArgumentParser(description="Builds the compiled modules for aarch64 and runs them under qemu.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "aarch64", help="for what is fetched and built")
    parser.add_argument(
        "--native", type=Path, default=ROOT / "src/mpispeed/_native", help="the modules of this machine"
    )
    options = parser.parse_args()
    try:
        return int(check(options.folder.resolve(), options.native.resolve()) > 0)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
