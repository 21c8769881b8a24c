"""The first line of a module's or class's docstring says what it is."""

import ast
import re

from tests.rules.trees import ALL_PYTHON, ROOT, nodes_of, tree_of, where

QUESTION = re.compile(r"(What|How|Which|Where|Whether|Who|Whom|Whose|When|Why)\b")


def questions(tree, nodes):
    """(line, name) of the module and of classes whose docstring begins with a question word."""
    for node in (tree, *(each for each in nodes if isinstance(each, ast.ClassDef))):
        if QUESTION.match(ast.get_docstring(node) or ""):
            yield getattr(node, "lineno", 1), getattr(node, "name", "the module")


def test_docstrings_of_modules_and_classes_state():
    asked = [
        f"{where(path, line)} {name}"
        for path in ALL_PYTHON
        if path.is_relative_to(ROOT / "src")
        for line, name in questions(tree_of(path), nodes_of(path))
    ]
    assert not asked, "these begin with a question word; say what the thing is:\n" + "\n".join(asked)


def test_the_check_sees_questions():
    classes = 'class A:\n    """What it holds."""\nclass B:\n    """Whatever it holds."""\n'
    tree = ast.parse(f'"""How it works."""\n{classes}')
    assert [name for _, name in questions(tree, ast.walk(tree))] == ["the module", "A"]
