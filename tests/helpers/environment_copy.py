"""An environment as a cluster has it on its shared file system: Python, packages and this checkout below one folder.

Files are hard links to those of the running environment where the file system allows, so that it takes no room and
bytecode stays valid. Tests that have no use for torch leave it out.
"""

from __future__ import annotations

import compileall
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINOR = f"python{sys.version_info.major}.{sys.version_info.minor}"
STANDARD_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "site-packages"}
FOR_LAUNCHER = ("click", "mpi4py", "typing_extensions")
"""Packages that `mpispeed run` and ranks without torch need."""


def make_environment(folder: Path, seen_at: Path, packages: Iterable[str] | None = None) -> Path:
    """Fill `folder` with `python`, the interpreter, and `env`, a virtual environment of it; give its python.

    Args:
        folder: where; has to be empty or missing.
        seen_at: the path at which processes will see the folder; it stands in the environment's settings.
        packages: names in site-packages to take, None for all; mpispeed is installed in any case, with bytecode if all
            are.

    Returns:
        The path of the environment's python, below `seen_at`.
    """
    _copy_python(folder / "python")
    env = folder / "env"
    site = env / "lib" / MINOR / "site-packages"
    site.mkdir(parents=True)
    (env / "bin").mkdir()
    (env / "bin" / "python").symlink_to(seen_at / "python" / "bin" / MINOR)
    (env / "bin" / "python3").symlink_to("python")
    (env / "pyvenv.cfg").write_text(
        f"home = {seen_at / 'python' / 'bin'}\ninclude-system-site-packages = false\n"
        f"version = {sys.version.split()[0]}\n"
    )
    _copy_packages(site, packages)
    _copy_launchers(env)
    shutil.copytree(ROOT / "src" / "mpispeed", site / "mpispeed", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cuda", "slurm"):  # as a wheel has them
        if not (site / "mpispeed" / f"_{name}").exists() and (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, site / "mpispeed" / f"_{name}")
    if packages is None:
        compileall.compile_dir(str(site / "mpispeed"), quiet=2, workers=1)
    return seen_at / "env" / "bin" / "python"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _copy_tree(source: Path, target: Path, ignore: Callable[[str, list[str]], set[str]] | None = None) -> None:
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=_link)


def _copy_python(folder: Path) -> None:
    base = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib"))

    def left_out(where: str, names: list[str]) -> set[str]:
        static = {name for name in names if name.startswith("config-")}
        return (STANDARD_LEFT_OUT | static) & set(names) if Path(where) == library else set()

    (folder / "bin").mkdir(parents=True)
    _link(os.path.realpath(sys.executable), str(folder / "bin" / MINOR))
    _copy_tree(library, folder / "lib" / library.name, left_out)
    for shared in (base / "lib").glob("libpython*.so*"):
        _link(os.path.realpath(shared), str(folder / "lib" / shared.name))


def _copy_packages(site: Path, packages: Iterable[str] | None) -> None:
    wanted = None if packages is None else set(packages)
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        ours = found.name.startswith(("__editable__", "mpispeed"))
        if ours or (wanted is not None and found.name.partition("-")[0].partition(".")[0] not in wanted):
            continue
        if found.is_dir():
            _copy_tree(found, site / found.name)
        else:
            _link(str(found), str(site / found.name))


def _copy_launchers(env: Path) -> None:
    """MPI of a wheel: its starters are in bin, its libraries in lib, beside Python's."""
    here = Path(sys.prefix)
    for found in (here / "bin").iterdir():
        if found.is_file() and found.name.startswith(("mpi", "hydra")) and found.read_bytes()[:2] != b"#!":
            _link(str(found), str(env / "bin" / found.name))
    for found in (here / "lib").iterdir():
        if found.is_dir() and not found.is_symlink() and found.name != MINOR:
            _copy_tree(found, env / "lib" / found.name)
        elif ".so" in found.name:
            _link(os.path.realpath(found), str(env / "lib" / found.name))
