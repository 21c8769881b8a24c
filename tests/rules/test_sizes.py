"""Limits on the tail: files, functions, classes, those with what they inherit, methods. They may only go down."""

import ast

from torch.distributed import ProcessGroup

from mpispeed.mesh.collectives import verbs
from tests.rules.trees import ALL_PYTHON, ROOT, nodes_of, tree_of, where

FILE_LINES, SETUP_LINES, FUNCTION_LINES, CLASS_LINES, PUBLIC_METHODS = 500, 150, 60, 300, 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
INHERITED_LINES = 350
"""Of the code of a class with that of its bases of this package."""

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


_VERBS = {row.name for row in vars(verbs).values() if isinstance(row, verbs.Verb | verbs.Message)}

PRESCRIBED = {
    "MpiProcessGroup": set(dir(ProcessGroup)),
    "Comm": _VERBS | {f"start_{name}" for name in _VERBS},
}
"""Methods that do not count, since their list is made elsewhere: torch calls them, or each is a row of the table of
verbs, which a script looks for at one place."""


def counted_methods(node):
    """Names of public methods that are the class's own choice."""
    return {item.name for item in node.body if is_public_method(item)} - PRESCRIBED.get(node.name, set())


def test_classes_have_few_public_methods():
    counts = ((place, len(counted_methods(node))) for place, node in nodes(ast.ClassDef))
    found = [f"{place} has {count}, the limit is {PUBLIC_METHODS}" for place, count in counts if count > PUBLIC_METHODS]
    assert not found, "\n".join(found)


def test_only_rows_of_the_table_of_verbs_do_not_count():
    text = "class Comm:\n    def send(self): ...\n    def start_send(self): ...\n    def agree(self): ...\n"
    assert counted_methods(ast.parse(text).body[0]) == {"agree"}
    assert counted_methods(ast.parse(text.replace("Comm", "Other")).body[0]) == {"send", "start_send", "agree"}


# -- with inherited lines ----------------------------------------------------------------------------------------------


def own_code_lines(node, text):
    """Numbers of the lines of a class without docstrings, blank lines, comments and signatures."""
    left_out = set()
    for each in ast.walk(node):
        if isinstance(each, (*FUNCTIONS, ast.ClassDef)):
            first = each.body[0]
            left_out.update(range(each.lineno, max(first.lineno, each.lineno + 1)))
            if ast.get_docstring(each, clean=False) is not None:
                left_out.update(range(first.lineno, first.end_lineno + 1))
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    code = range(node.lineno, node.end_lineno + 1)
    return [n for n in code if n not in left_out and lines[n] and not lines[n].startswith("#")]


def classes_of(trees):
    """(module, name) -> lines of code of the class itself, and its bases as (module, name)."""
    found = {}
    for module, (tree, text) in trees.items():
        named = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                named |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                words = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
                bases = [named.get(word, (module, word)) for word in words]
                found[module, node.name] = len(own_code_lines(node, text)), bases
    return found


def total_lines(key, classes):
    """Lines of code of a class and of all its bases, each once."""
    seen, todo = set(), [key]
    while todo:
        one = todo.pop()
        if one in classes and one not in seen:
            seen.add(one)
            todo += classes[one][1]
    return sum(classes[one][0] for one in seen)


def modules_of_the_package():
    for path in ALL_PYTHON:
        if path.is_relative_to(ROOT / "src"):
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            yield module, (tree_of(path), path.read_text())


def test_classes_are_short_with_what_they_inherit():
    classes = classes_of(dict(modules_of_the_package()))
    totals = {key: total_lines(key, classes) for key in classes}
    found = [f"{module}.{name}: {lines}" for (module, name), lines in totals.items() if lines > INHERITED_LINES]
    assert not found, f"{sorted(found)}: the limit is {INHERITED_LINES}; let the class hold objects instead"


def test_lines_of_bases_count():
    base = (
        "class Base:\n    '''Text.'''\n\n    def one(self, x,\n            y):\n        # Reason.\n        return x\n"
    )
    child = "from base import Base as Own\n\nclass Child(Own, dict):\n    field = 1\n"
    classes = classes_of({"base": (ast.parse(base), base), "child": (ast.parse(child), child)})
    assert classes["base", "Base"][0] == 1
    assert total_lines(("child", "Child"), classes) == 2
