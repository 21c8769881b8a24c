"""Syntax trees of the checkout: parsed and walked once, for all rules."""

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL_PYTHON = sorted(
    path for tree in ("src", "tests", "tools", "benchmarks", "docs") for path in (ROOT / tree).rglob("*.py")
)


@functools.cache
def tree_of(path):
    """What is in a file."""
    gc.disable()  # nothing of it is garbage, and collections would look at millions of nodes in vain
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes_of(path):
    """All its nodes."""
    return tuple(ast.walk(tree_of(path)))


def where(path, line):
    """For a message."""
    return f"{path.relative_to(ROOT)}:{line}"
