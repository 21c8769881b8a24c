"""Finds the files of this Python's environment: the virtual environment, the Python below it, editable installs.

In an archive `base` is the Python, `venv` the virtual environment (none if there is none), `extra/N` folders from
elsewhere. Links are followed, so that nothing refers to what is outside. Left out is what no rank imports: static
libraries, headers of Python, tests and editors of the standard library, bytecode of other Pythons, and environments
in folders of packages.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpispeed.base.errors import StagingError
from mpispeed.staging import elf

_TAG = sys.implementation.cache_tag
_OMITTED_FOLDERS = frozenset({".git", ".hg", ".svn", "node_modules"})
_OMITTED_OF_PYTHON = frozenset({"test", "idlelib", "turtledemo", "site-packages", "dist-packages"})
_MAPPING = re.compile(r"^MAPPING(?::[^=]*)? = (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class File:
    """A file of an archive: its path there, and its source or its text; `mtime` is that of a text."""

    path: str
    source: str = ""
    text: bytes | None = None
    is_executable: bool = False
    mtime: int = 0


@dataclass(slots=True)
class Contents:
    """List of what an archive is to hold.

    Attributes:
        python: path of the interpreter in the archive.
        libraries: folder with the library of the interpreter, for LD_LIBRARY_PATH; empty if it needs none.
        files: all files, by their path in the archive.
    """

    python: str = ""
    libraries: str = ""
    files: dict[str, File] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders of a Python: its `sites` have packages, `mapped` are packages of editable installs found by a table."""

    prefix: Path
    base: Path
    sites: tuple[Path, ...]
    mapped: tuple[Path, ...]
    version: str

    @property
    def has_venv(self) -> bool:
        """True if the prefix is a virtual environment."""
        return self.prefix != self.base

    @property
    def home(self) -> str:
        """Folder of the archive that becomes `sys.prefix`."""
        return "venv" if self.has_venv else "base"


def own_paths(environ: Mapping[str, str] | None = None) -> Paths:
    """Folders of this Python; those of PYTHONPATH do not belong to it.

    Raises:
        StagingError: a Python that is asked for its path does not answer.
    """
    environ = dict(os.environ if environ is None else environ)
    environ.pop("PYTHONPATH", None)
    words = [sys.executable, "-c", "import os, sys; os.write(1, '\\0'.join(sys.path[1:]).encode())"]
    try:
        said = subprocess.run(words, capture_output=True, timeout=120, check=True, env=environ, cwd="/")
    except (OSError, subprocess.SubprocessError) as error:
        msg = f"{sys.executable} does not tell its path: {error}; stage an environment whose Python starts"
        raise StagingError(msg) from None
    standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    found = []
    for name in os.fsdecode(said.stdout).split("\0"):
        place = Path(os.path.realpath(name))
        if place.is_dir() and str(place) not in standard and place.name != "lib-dynload":
            found.append(place)
    sites = tuple(dict.fromkeys(found))
    return Paths(
        Path(os.path.realpath(sys.prefix)), Path(os.path.realpath(sys.base_prefix)), sites, tuple(_mapped(sites)),
        f"python{sys.version_info[0]}.{sys.version_info[1]}",
    )  # fmt: skip


def find_contents(paths: Paths, exclude: Sequence[str] = ()) -> Contents:
    """Find all files of an environment.

    Args:
        paths: of the Python.
        exclude: patterns of paths in the archive to leave out, as in fnmatch, such as `venv/*/torch/include/*`.

    Raises:
        StagingError: the environment cannot be read.
    """
    contents = Contents()
    try:
        _add_base(contents, paths)
        if paths.has_venv:
            _add_venv(contents, paths)
        _add_sites(contents, paths)
        _relocate(contents, paths)
    except OSError as error:
        msg = f"the environment cannot be read: {error}; mend or remove what is broken there"
        raise StagingError(msg) from error
    for path in list(contents.files):
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
            del contents.files[path]
    return contents


def _add_base(contents: Contents, paths: Paths) -> None:
    executable = Path(os.path.realpath(sys.executable))
    contents.python = f"{paths.home}/bin/python"
    for name in (f"base/bin/{paths.version}", contents.python, f"{paths.home}/bin/python3"):
        contents.files[name] = File(name, str(executable), is_executable=True)
    if (paths.base / "conda-meta").is_dir():  # all packages share its lib, and find it by their own place
        _add_tree(contents, paths.base / "lib", "base/lib", omitted=frozenset({"test", "idlelib", "turtledemo"}))
        return
    for name in ("stdlib", "platstdlib"):
        # Those of the base: in a virtual environment the second is its own lib.
        folder = Path(sysconfig.get_path(name, vars={"base": str(paths.base), "platbase": str(paths.base)}))
        _add_tree(contents, folder, f"base/{folder.relative_to(paths.base)}", omitted=_OMITTED_OF_PYTHON)
    folder = Path(sysconfig.get_config_var("LIBDIR") or paths.base / "lib")
    for library in sorted({*folder.glob("libpython3*.so*"), *(paths.base / "lib").glob("libpython3*.so*")}):
        name = f"base/lib/{library.name}"
        contents.files[name] = File(name, os.path.realpath(library), is_executable=True)
        contents.libraries = "base/lib"


def _add_venv(contents: Contents, paths: Paths) -> None:
    lines = (paths.prefix / "pyvenv.cfg").read_text().splitlines()
    kept = [line for line in lines if line.split("=")[0].strip() not in ("home", "executable", "command")]
    text = "\n".join(["home = @STAGED_FOLDER@/base/bin", *kept, ""])
    contents.files["venv/pyvenv.cfg"] = File("venv/pyvenv.cfg", text=text.encode())
    for entry in sorted(os.scandir(paths.prefix / "bin"), key=lambda entry: entry.name):
        if entry.is_file() and not entry.name.startswith("python"):
            name = f"venv/bin/{entry.name}"
            contents.files[name] = _script(name, entry.path, paths)
    # Libraries of wheels, such as that of an MPI, lie beside the folder of packages.
    folder = paths.prefix / "lib"
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            if not entry.name.startswith("python"):
                _add_tree(contents, Path(entry.path), f"venv/lib/{entry.name}")
        else:
            name = f"venv/lib/{entry.name}"
            contents.files[name] = File(
                name, os.path.realpath(entry.path), is_executable=os.access(entry.path, os.X_OK)
            )


def _script(name: str, source: str, paths: Paths) -> File:
    """A file of `bin`; the Python of a script becomes that of the archive."""
    is_executable = os.access(source, os.X_OK)
    with Path(source).open("rb") as file:
        text = file.read() if file.peek(2)[:2] == b"#!" else b""
    first, newline, rest = text.partition(b"\n")
    own = {os.fsencode(sys.prefix), os.fsencode(paths.prefix)}
    if any(first.startswith((b"#!" + folder + b"/bin/python", b"#! " + folder + b"/bin/python")) for folder in own):
        first = b"#!@STAGED_FOLDER@/venv/bin/python"
        return File(name, text=first + newline + rest, is_executable=True)
    return File(name, os.path.realpath(source), is_executable=is_executable)


def _add_sites(contents: Contents, paths: Paths) -> None:
    """Add the folders of packages; those outside of the environment are named in a file .pth of the archive."""
    if not paths.sites:
        msg = f"{sys.executable} has no folder of packages, so that there is nothing to stage"
        raise StagingError(msg)
    lines: list[str] = []
    main = ""
    number = 0
    for folder in paths.sites:
        if folder.is_relative_to(paths.prefix):
            name = f"{paths.home}/{folder.relative_to(paths.prefix)}"
        elif folder.is_relative_to(paths.base):
            name = f"base/{folder.relative_to(paths.base)}"
        else:
            name = f"extra/{number}"
            number += 1
            lines.append(name)
        main = main or ("" if name.startswith("extra/") else name)
        _add_tree(contents, folder, name)
    main = main or f"{paths.home}/lib/{paths.version}/site-packages"
    for mapped in paths.mapped:
        name = f"extra/{number}"
        number += 1
        _add_tree(contents, mapped, f"{name}/{mapped.name}")
        lines.append(name)
    _drop_absolute_lines(contents)
    up = "/".join([".."] * len(main.split("/")))
    text = "".join(f"{up}/{line}\n" for line in lines) + "import _mpispeed_staged\n"
    contents.files[f"{main}/mpispeed_staged.pth"] = File(f"{main}/mpispeed_staged.pth", text=text.encode())
    name = f"{main}/_mpispeed_staged.py"
    contents.files[name] = File(name, text=_HOLD.format(up=up).encode())


_HOLD = '''"""Holds the lock of the folder that this Python was unpacked to, as long as the process lives."""

import fcntl, os

try:
    file = os.open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "{up}", "lock"), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(file, fcntl.LOCK_SH)
except OSError:
    pass
'''


def _relocate(contents: Contents, paths: Paths) -> None:
    """Make library paths relative that lead into the environment, in the Python and its own modules.

    Packages of wheels have relative ones.
    """
    finds_library = True
    for path, file in list(contents.files.items()):
        is_program = path.startswith(("base/bin/", "venv/bin/python"))
        is_library = path.startswith("base/lib") and ".so" in path.rpartition("/")[2] and "-packages/" not in path
        if not (is_program or is_library) or not file.source:
            continue
        data = Path(file.source).read_bytes()

        def moved(folder: str, path: str = path) -> str:
            real = Path(os.path.realpath(folder))
            if folder.startswith("$") or not real.is_relative_to(paths.base):
                return folder
            target = f"base/{real.relative_to(paths.base)}"
            return "$ORIGIN/" + os.path.relpath(target, path.rpartition("/")[0])

        changed = elf.relocated(data, moved)
        if changed is not None:
            mtime = int(Path(file.source).stat().st_mtime)
            contents.files[path] = replace(file, source="", text=changed, mtime=mtime)
        elif is_program and b"libpython" in data and b"$ORIGIN" not in data:
            finds_library = False
    if finds_library:
        contents.libraries = ""


def _mapped(sites: Sequence[Path]) -> Iterator[Path]:
    """Packages of editable installs that setuptools finds by a table, in place of a folder of the path."""
    for folder in sites:
        for finder in sorted(folder.glob("__editable___*_finder.py")):
            try:
                match = _MAPPING.search(finder.read_text(errors="replace"))
                table = ast.literal_eval(match[1]) if match else {}
                sources = [Path(source) for _, source in sorted(table.items())]
            except (OSError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
                msg = f"{finder} has no table of folders as setuptools writes it: {error}; install what it is of again"
                raise StagingError(msg) from None
            yield from (source for source in sources if source.exists())


def _drop_absolute_lines(contents: Contents) -> None:
    """Take out of .pth files what would lead back to the folders that were packed from."""
    for path, file in list(contents.files.items()):
        if (
            not path.endswith(".pth")
            or path.count("site-packages/") + path.count("dist-packages/") != 1
            or not file.source
        ):
            continue
        with Path(file.source).open(errors="surrogateescape") as opened:
            lines = opened.read().splitlines()
        kept = [line for line in lines if not line.startswith("/") and "__editable___" not in line]
        if kept != lines:
            contents.files[path] = File(
                path, text="".join(f"{line}\n" for line in kept).encode(errors="surrogateescape")
            )


def _add_tree(
    contents: Contents, folder: Path, name: str, *, omitted: frozenset[str] = frozenset(), above: tuple[str, ...] = ()
) -> None:
    """Add a folder with everything below it; `omitted` names of folders count at its top only.

    Raises:
        StagingError: links lead back to a folder that contains them.
    """
    if folder.is_file():
        contents.files[name] = File(name, str(folder), is_executable=os.access(folder, os.X_OK))
        return
    real = os.path.realpath(folder)
    if real in above:
        msg = f"{folder} leads back to {real}, which contains it; remove that link to stage the environment"
        raise StagingError(msg)
    for entry in sorted(os.scandir(real), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            skipped = entry.name in omitted or entry.name.startswith("config-3")
            if not (skipped or is_left_out(entry.path)):
                _add_tree(contents, Path(entry.path), path, above=(*above, real))
        elif entry.is_file() and _is_wanted(entry.name) and path not in contents.files:
            source = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            contents.files[path] = File(path, source, is_executable=_may_run(entry))


def is_left_out(folder: str) -> bool:
    """True for folders below one of packages that no rank imports from: of version control, and other environments.

    The folder of a project may have the environment itself in it, with the archive.
    """
    return folder.rpartition("/")[2] in _OMITTED_FOLDERS or os.path.lexists(f"{folder}/pyvenv.cfg")


def _is_wanted(name: str) -> bool:
    if name.endswith(".pyc"):
        return name.endswith(f".{_TAG}.pyc") or "." not in name[:-4]
    return not name.endswith(".a")


def _may_run(entry: os.DirEntry[str]) -> bool:
    return bool(entry.stat().st_mode & 0o111)
