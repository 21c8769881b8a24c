"""The package `deepspeed` of the table, made importable: by its folder, which children inherit, or by a wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import logging
import os
import sys
import zipfile
from collections.abc import MutableMapping
from importlib.machinery import PathFinder
from pathlib import Path

from mpispeed.compat.names import VERSION

log = logging.getLogger(__name__)

#: holds the package `deepspeed`, the metadata of that name, and the command
FOLDER = Path(__file__).resolve().parents[1] / "_deepspeed"

_INFO = f"deepspeed-{VERSION}.dist-info"
_WHEEL_TEXT = "Wheel-Version: 1.0\nGenerator: mpispeed\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_COMMANDS = "[console_scripts]\ndeepspeed = mpispeed.cli.main:deepspeed_main\n"


def find_real() -> str:
    """Where DeepSpeed itself is installed, with its version if it is known; empty if it is not."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    for known in importlib.metadata.distributions(name="deepspeed", path=others):
        if known.version != VERSION:
            return f"version {known.version} in {known.locate_file('')}"
    found = PathFinder.find_spec("deepspeed", others)
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).read_text(errors="replace") if found.origin.endswith(".py") else ""
    return "" if "become_deepspeed(__name__)" in text else found.origin


def activate(environ: MutableMapping[str, str] | None = None) -> bool:
    """Make `import deepspeed` find the names of mpispeed, here and in processes that this one starts.

    DeepSpeed itself, if it is installed, stays what it is: a warning says where it was found.

    Args:
        environ: receives PYTHONPATH and PATH; None for `os.environ`.

    Returns:
        True if the names are served.
    """
    real = find_real()
    if real:
        log.warning("DeepSpeed itself is installed (%s), so `import deepspeed` is left to it; uninstall it", real)
        return False
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
        importlib.invalidate_caches()
    environ = os.environ if environ is None else environ
    environ["PYTHONPATH"] = with_folder(environ.get("PYTHONPATH", ""))
    add_command(environ)
    return True


def add_command(environ: MutableMapping[str, str]) -> None:
    """Let PATH of `environ` find the command `deepspeed` of mpispeed, after any other of that name."""
    folder = str(FOLDER / "bin")
    entries = environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in entries:
        environ["PATH"] = os.pathsep.join([*entries, folder])
    environ.setdefault("MPISPEED_PYTHON", sys.executable)


def with_folder(python_path: str) -> str:
    """A value of PYTHONPATH that begins with the folder of `deepspeed`."""
    rest = [entry for entry in python_path.split(os.pathsep) if entry and entry != str(FOLDER)]
    return os.pathsep.join([str(FOLDER), *rest])


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the package `deepspeed`, which needs mpispeed installed beside it; return its path.

    Raises:
        OSError: it cannot be written.
    """
    files = {
        "deepspeed/__init__.py": (FOLDER / "deepspeed" / "__init__.py").read_bytes(),
        f"{_INFO}/METADATA": (FOLDER / _INFO / "METADATA").read_bytes(),
        f"{_INFO}/WHEEL": _WHEEL_TEXT.encode(),
        f"{_INFO}/entry_points.txt": _COMMANDS.encode(),
        f"{_INFO}/top_level.txt": b"deepspeed\n",
    }
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{_INFO}/RECORD"] = "\n".join([*rows, f"{_INFO}/RECORD,,", ""]).encode()
    path = folder / f"deepspeed-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
