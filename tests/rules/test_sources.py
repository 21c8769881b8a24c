"""What sources must not contain: prints, asserts, imports of the package root, names of the top-level folders."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.trees import ALL_PYTHON, ROOT, nodes_of, tree_of, where

PACKAGE = ROOT / "src" / "mpispeed"
TREES = ("src", "tests", "tools", "benchmarks", "docs")
SOURCES = sorted(PACKAGE.rglob("*.py"))
# A module called so collects whatever has no home.
HOMELESS = {"utils", "util", "helpers", "common", "misc"}
# Words that promise instead of do, signatures, and paths of one machine: this checkout's, and anybody's home.
FORBIDDEN = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|raise NotImplementedError|Co-[Aa]uthored-[Bb]y)\b|/(root|home/\w+|Users/\w+)/|"
    + re.escape(f"{ROOT}/")
)
WRITTEN = {".py", ".pyi", ".pyx", ".pxd", ".h", ".cu", ".cuh", ".md", ".sbatch", ".toml", ".json", ""}


def nodes(paths, kinds):
    """(file:line, file, node) of all nodes of these kinds."""
    for path in paths:
        for node in nodes_of(path):
            if isinstance(node, kinds):
                yield where(path, node.lineno), path, node


def imports(paths):
    """(file:line, module, names) of every absolute import."""
    for place, _, node in nodes(paths, (ast.Import, ast.ImportFrom)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield place, alias.name, set()
        elif node.level == 0:
            yield place, node.module, {alias.name for alias in node.names}


def is_print(call):
    return isinstance(call.func, ast.Name) and call.func.id == "print"


def test_nothing_prints():
    found = [
        place for place, path, node in nodes(SOURCES, ast.Call) if is_print(node) and path.parent != PACKAGE / "cli"
    ]
    assert not found, f"{found}: use the module's logger"


def test_nothing_asserts():
    found = [place for place, _, _ in nodes(SOURCES, ast.Assert)]
    assert not found, f"{found}: raise a typed error that says what to do"


def environment_entries(found):
    """(node, value as text) of every "PYTHONPATH" in a dict among these nodes."""
    for node in found:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "PYTHONPATH":
                    yield value, ast.unparse(value)


def test_processes_of_tests_run_this_checkout():
    """A PYTHONPATH without src has them run what happens to be installed."""
    paths = [path for path in ALL_PYTHON if path.relative_to(ROOT).parts[0] in ("tests", "benchmarks")]
    found = [
        where(path, value.lineno)
        for path in paths
        for value, text in environment_entries(nodes_of(path))
        if "ROOT" in text and "src" not in text
    ]
    assert not found, f"{found}: use tests.helpers.system.CHECKOUT"
    assert list(environment_entries(ast.walk(ast.parse("x = {**y, 'PYTHONPATH': str(ROOT)}"))))


def test_nothing_inside_imports_the_package_root():
    floors = {module.stem for module in PACKAGE.iterdir()}
    inside = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
    roots = ((place, names) for place, module, names in imports(inside) if module == "mpispeed")
    found = [place for place, names in roots if not names or names - floors]
    assert not found, f"{found}: name the floor that has it"


def test_nothing_imports_cython():
    found = [place for place, module, _ in imports(ALL_PYTHON) if module.split(".")[0] == "cython"]
    # The rule below asks where the name leads.
    assert not found, f"{found}: ./cython carries that name"


@pytest.mark.parametrize("folder", ["cython", "cuda", "slurm"])
def test_top_level_folders_are_no_packages(folder):
    assert (ROOT / folder).is_dir()
    assert not list((ROOT / folder).rglob("*.py"))


def test_cython_is_not_shadowed_in_the_checkout():
    code = "import cython, Cython; print(cython.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "cython")


def test_modules_are_named_for_what_they_do():
    assert not [str(path) for path in SOURCES if path.stem in HOMELESS]


def test_every_module_says_what_it_is():
    assert not [str(path) for path in SOURCES if not ast.get_docstring(tree_of(path))]


def written_files():
    """Files that people wrote, outside of build products."""
    tops = [ROOT / name for name in (*TREES, "cython", "cuda", "slurm", "README.md", "CONTRIBUTING.md", "Makefile")]
    for top in tops:
        candidates = [top] if top.is_file() else sorted(top.rglob("*"))
        yield from (path for path in candidates if path.is_file() and path.suffix in WRITTEN)


def test_no_promises_no_signatures_no_local_paths():
    lines = (
        (where(path, number), line)
        for path in written_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
    )
    found = [f"{place}: {line.strip()[:100]}" for place, line in lines if FORBIDDEN.search(line)]
    assert not found, "\n".join(found)
