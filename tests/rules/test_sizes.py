"""Limits on the tail: files, functions, classes, public methods. They may only go down."""

import ast

from tests.rules.trees import ALL_PYTHON, ROOT, nodes_of, where

FILE_LINES, SETUP_LINES, FUNCTION_LINES, CLASS_LINES, PUBLIC_METHODS = 500, 120, 60, 300, 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NATIVE_SUFFIXES = {".pyx", ".pxd", ".h", ".cu", ".cuh"}

NATIVE = sorted(
    path for tree in ("cython", "cuda") for path in (ROOT / tree).rglob("*") if path.suffix in NATIVE_SUFFIXES
)


def nodes(kinds):
    """(file:line, node) of all nodes of these kinds."""
    for path in ALL_PYTHON:
        for node in nodes_of(path):
            if isinstance(node, kinds):
                yield f"{where(path, node.lineno)} {node.name}", node


def too_long(kinds, limit):
    lengths = ((place, node.end_lineno - node.lineno + 1) for place, node in nodes(kinds))
    return [f"{place} has {lines} lines, the limit is {limit}" for place, lines in lengths if lines > limit]


def is_public_method(node):
    """True for what is called by name; a property is read like an attribute."""
    if not isinstance(node, FUNCTIONS) or node.name.startswith("_"):
        return False
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not decorators & {"property", "cached_property", "setter"}


def test_files_are_short():
    limits = {
        path: SETUP_LINES if path.name == "setup.py" else FILE_LINES
        for path in [*ALL_PYTHON, *NATIVE, ROOT / "setup.py"]
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


PRESCRIBED = {"MpiProcessGroup", "Comm"}
"""Classes whose methods are a list made elsewhere: torch's of names that it calls, and the table of verbs."""


def test_classes_have_few_public_methods():
    classes = ((place, node) for place, node in nodes(ast.ClassDef) if node.name not in PRESCRIBED)
    counts = ((place, sum(map(is_public_method, node.body))) for place, node in classes)
    found = [f"{place} has {count}, the limit is {PUBLIC_METHODS}" for place, count in counts if count > PUBLIC_METHODS]
    assert not found, "\n".join(found)
