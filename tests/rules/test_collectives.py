"""Functions that communicate say which ranks must call them."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "mpispeed"
# `reduce` on these is something else.
OTHER_OWNERS = {"functools", "np", "torch"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROOMS = ("mesh", "sharding", "ckpt")


def collective_methods():
    """Methods of `Comm` whose docstrings say that they are collective."""
    tree = ast.parse((PACKAGE / "mesh" / "comm.py").read_text())
    (comm,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Comm")
    methods = (node for node in comm.body if isinstance(node, FUNCTIONS))
    return {node.name for node in methods if "Collective over" in (ast.get_docstring(node) or "")}


# Methods of much else have these names too.
COMMON = {"start", "split", "duplicate", "close"}
VERBS = collective_methods() - COMMON


def is_verb(node):
    """True for a call such as comm.all_reduce(...) or self.comm.agree(...), not for super() or a module's function."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VERBS):
        return False
    owner = node.func.value
    return not (isinstance(owner, ast.Name) and owner.id in OTHER_OWNERS)


def public_functions(tree):
    """Module functions, and methods of public classes, whose names are public."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, FUNCTIONS) and not item.name.startswith("_"):
                    yield f"{node.name}.{item.name}", item


def silent_functions(text):
    """Names of public functions that call a verb and do not say over which ranks."""
    for qualified, node in public_functions(ast.parse(text)):
        if any(is_verb(part) for part in ast.walk(node)) and "Collective over" not in (ast.get_docstring(node) or ""):
            yield f"line {node.lineno}: {qualified}"


def test_communicating_functions_name_their_ranks():
    sources = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
    assert {path.relative_to(PACKAGE).parts[0] for path in sources} == set(ROOMS)
    found = [f"{path.relative_to(PACKAGE)} {hit}" for path in sources for hit in silent_functions(path.read_text())]
    assert not found, "add a section 'Collective over:' to the docstring of\n" + "\n".join(found)


def test_the_check_finds_a_silent_function():
    silent = "def f(comm, x):\n    comm.all_reduce(x)\n"
    text = silent + "def g(x):\n    '''Collective over: data.'''\n    x.comm.agree(True)\n"
    assert list(silent_functions(text)) == ["line 1: f"]
