"""The builders of an engine give its parts what they need through constructors: no attribute is set afterwards."""

import ast

from tests.rules.trees import ROOT, tree_of, where

BUILDERS = sorted((ROOT / "src/mpispeed/engine/build").glob("*.py"))


def wired(tree):
    """(line, text) of the attributes that functions outside of classes set."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set or (isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"):
            yield node.lineno, ast.unparse(node)


def test_builders_wire_nothing_in_later():
    assert BUILDERS
    found = [f"{where(path, line)} {text}" for path in BUILDERS for line, text in wired(tree_of(path))]
    assert not found, "give these to the constructor:\n" + "\n".join(found)


def test_the_check_sees_attributes():
    source = "def build(a):\n    a.b = 1\n    a.c.d += 2\n    setattr(a, 'e', 3)\n    f = a.g\n"
    assert [line for line, _ in wired(ast.parse(source))] == [2, 3, 4]
