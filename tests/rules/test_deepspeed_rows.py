"""Documented and customary uses of DeepSpeed that stopped here once: each has tests that show it go on, or say why not.

A test shows a row if it is marked with `@pytest.mark.deepspeed_row("a1")`, or with several rows. `pytest -s` on this
file lists which test shows which row.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

from tests.rules.trees import ROOT, nodes_of, where

MARK = "deepspeed_row"
TESTS = ROOT / "tests"
ROWS = {
    "a1": "ranks take different experts of a module that is a leaf of ZeRO-3",
    "a2": "DeepSpeed's own optimizers are passed as objects with ZeRO stages 1 to 3, with states in files too",
    "a3": "several engines train on one loss, by loss.backward() and _backward_epilogue()",
    "a4": "states of a client's optimizer that are numbers or tensors of one element come back from a checkpoint",
    "a5": "a tag that exists is saved again",
    "a6": "a model is given to a second engine without destroy()",
    "a7": "training_data of a pipeline keep their order",
    "a8": "nvme_path is a folder that has to be made",
    "a9": "engine.allreduce_gradients() averages by hand",
    "a10": "offload_param stays in the config below stage 3",
    "a11": "fp16 at stage 0 skips steps at the least loss scale and goes on, with 1-bit optimizers too",
    "a12": "torch_adam with optimizer states on NVMe",
    "a13": "engine.compile(backend=..., compile_kwargs=...) and engine.is_compiled",
    "a14": "options of the launcher deepspeed, and a host file that is not there",
    "a15": "sparse gradients of embeddings with CPUAdagrad",
    "a16": "a config in HJSON",
    "a17": "errors are caught by their types",
    "a18": "client_state has namespaces, paths, dtypes and enums",
    "a19": "deepspeed.__git_hash__ and __git_branch__",
}


def is_the_mark(node):
    """True for `pytest.mark.deepspeed_row(...)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == MARK


def rows_of(function):
    """The rows that a test is marked with."""
    for decorator in function.decorator_list:
        if is_the_mark(decorator):
            yield from (arg.value if isinstance(arg, ast.Constant) else ast.unparse(arg) for arg in decorator.args)


def marked(paths):
    """Row -> names of its tests with their places; and the lines of marks that stand on no test."""
    shown, strays = defaultdict(list), []
    for path in paths:
        on_tests = set()
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                on_tests.update(decorator for decorator in node.decorator_list if is_the_mark(decorator))
                for row in rows_of(node):
                    shown[row].append(f"{node.name} ({where(path, node.lineno)})")
        strays += [where(path, node.lineno) for node in nodes_of(path) if is_the_mark(node) and node not in on_tests]
    return shown, strays


def listing(shown):
    """Each row with its tests."""
    lines = []
    for row, use in ROWS.items():
        lines.append(f"{row}: {use}")
        lines += [f"    {name}" for name in shown.get(row, ["no test shows it"])]
    return "\n".join(lines)


def test_each_row_has_a_test():
    shown, strays = marked(TESTS.rglob("test_*.py"))
    sys.stdout.write(f"\n{listing(shown)}\n")
    assert not strays, f"{strays}: the mark {MARK} is for functions of tests only"
    assert not set(shown) - set(ROWS), f"rows {sorted(set(shown) - set(ROWS))} are not in {Path(__file__).name}"
    lacking = [row for row in ROWS if row not in shown]
    assert not lacking, f"no test is marked with {', '.join(lacking)}\n{listing(shown)}"


def test_marks_are_found_and_those_elsewhere_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "test_some.py"
    path.write_text(
        "import pytest\n"
        '@pytest.mark.deepspeed_row("a1", "a2")\ndef test_one(): ...\n'
        '@pytest.mark.deepspeed_row("a2")\n@pytest.mark.ranks(1)\ndef test_two(): ...\n'
        '@pytest.mark.deepspeed_row("a3")\ndef helper(): ...\n'
    )
    monkeypatch.setattr("tests.rules.trees.ROOT", tmp_path)
    shown, strays = marked([path])
    assert dict(shown) == {
        "a1": ["test_one (test_some.py:3)"], "a2": ["test_one (test_some.py:3)", "test_two (test_some.py:6)"]
    }  # fmt: skip
    assert strays == ["test_some.py:7"]
