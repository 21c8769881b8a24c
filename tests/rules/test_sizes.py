"""Limits on the tail: files, functions, classes, public methods. They may only go down."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, SETUP_LINES, FUNCTION_LINES, CLASS_LINES, PUBLIC_METHODS = 500, 120, 60, 300, 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NATIVE_SUFFIXES = {".pyx", ".pxd", ".h", ".cu", ".cuh"}

PYTHON = sorted(
    path for tree in ("src", "tests", "tools", "benchmarks", "docs") for path in (ROOT / tree).rglob("*.py")
)
NATIVE = sorted(
    path for tree in ("cython", "cuda") for path in (ROOT / tree).rglob("*") if path.suffix in NATIVE_SUFFIXES
)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def nodes(kinds):
    """(file:line, node) of all nodes of these kinds."""
    for path in PYTHON:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def too_long(kinds, limit):
    lengths = ((where, node.end_lineno - node.lineno + 1) for where, node in nodes(kinds))
    return [f"{where} has {lines} lines, the limit is {limit}" for where, lines in lengths if lines > limit]


def is_public_method(node):
    """True for what is called by name; a property is read like an attribute."""
    if not isinstance(node, FUNCTIONS) or node.name.startswith("_"):
        return False
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not decorators & {"property", "cached_property", "setter"}


def test_files_are_short():
    limits = {
        path: SETUP_LINES if path.name == "setup.py" else FILE_LINES for path in [*PYTHON, *NATIVE, ROOT / "setup.py"]
    }
    lengths = {path: len(path.read_text().splitlines()) for path in limits}
    found = [f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > limits[path]]
    assert not found, "\n".join(found)


def test_functions_are_short():
    found = too_long(FUNCTIONS, FUNCTION_LINES)
    assert not found, "\n".join(found)


def test_classes_are_short():
    found = too_long(ast.ClassDef, CLASS_LINES)
    assert not found, "\n".join(found)


def test_classes_have_few_public_methods():
    counts = ((where, sum(map(is_public_method, node.body))) for where, node in nodes(ast.ClassDef))
    found = [f"{where} has {count}, the limit is {PUBLIC_METHODS}" for where, count in counts if count > PUBLIC_METHODS]
    assert not found, "\n".join(found)
