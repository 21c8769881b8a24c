"""What transformers, accelerate, peft, trl and lightning take from deepspeed is in the table of names."""

import ast
import importlib.util
from pathlib import Path

import pytest

from mpispeed.compat.modules import Unserved, lookup, paths

WHEELS = ("transformers", "accelerate", "peft", "trl", "lightning")


def sources(wheel):
    """Files of an installed package that mention deepspeed; the package is not imported."""
    spec = importlib.util.find_spec(wheel)
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(f"{wheel} is not installed: install all of {', '.join(WHEELS)}")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "deepspeed" in text:
                yield path, text


def chain(node):
    """`a.b.c` as a list, from an attribute node; empty if its root is no plain name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def imported(node):
    """(local name, dotted name) of what an import takes from deepspeed."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "deepspeed":
                yield (alias.asname, alias.name) if alias.asname else ("deepspeed", "deepspeed")
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "deepspeed":
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def spelled(node):
    """Dotted names that a node of any kind has by itself."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.startswith("deepspeed."))
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (name for _, name in imported(node))
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        text = node.args[0].value
        if called in ("import_module", "find_spec", "__import__") and str(text).startswith("deepspeed."):
            yield text


def names_in(text):
    """line -> dotted names below deepspeed, of imports and of attribute chains; longest chains only."""
    nodes = list(ast.walk(ast.parse(text)))
    local = {name: dotted for node in nodes for name, dotted in imported(node)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        yield from ((node.lineno, dotted) for dotted in spelled(node))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in inner:
            names = chain(node)
            if names and names[0] in local:
                yield node.lineno, ".".join([local[names[0]], *names[1:]])


def fault(dotted):
    """Why a dotted name can neither be had nor is known to be missing; "" if it is."""
    names = dotted.split(".")[1:]
    end = max((at for at in range(len(names) + 1) if ".".join(names[:at]) in paths()), default=0)
    if end == len(names):
        return ""
    try:
        found = lookup("deepspeed", ".".join(names[:end]), names[end])
    except Unserved:
        return ""
    except AttributeError as error:
        return str(error).partition(";")[0]
    for name in names[end + 1 :]:
        if not hasattr(found, name):
            return f"{type(found).__name__} {getattr(found, '__name__', '')} has no {name}"
        found = getattr(found, name)
    return ""


@pytest.mark.parametrize("wheel", WHEELS)
def test_all_names_are_known(wheel):
    taken = {}
    for path, text in sources(wheel):
        for line, dotted in names_in(text):
            taken.setdefault(dotted, f"{path.name}:{line}")
    assert len(taken) >= 2, f"{wheel} takes {sorted(taken)}: is it read well?"
    unknown = [f"{place} {dotted}: {fault(dotted)}" for dotted, place in sorted(taken.items()) if fault(dotted)]
    assert not unknown, "\n".join(unknown)


SAMPLE = """
import deepspeed, os
import deepspeed.comm as comm
from deepspeed.utils import groups as g
from deepspeed.moe.layer import MoE
from .integrations import deepspeed as other

def f(engine):
    deepspeed.zero.Init(os.path.x)
    comm.barrier()
    g.get_data_parallel_group()
    engine.deepspeed.nothing
    deepspeed.checkpointing = None
    importlib.import_module("deepspeed.runtime.zero.stage3")
"""


def test_imports_and_chains_are_found():
    assert {dotted for _, dotted in names_in(SAMPLE)} == {
        "deepspeed", "deepspeed.comm", "deepspeed.utils.groups", "deepspeed.moe.layer.MoE", "deepspeed.zero.Init",
        "deepspeed.comm.barrier", "deepspeed.utils.groups.get_data_parallel_group", "deepspeed.runtime.zero.stage3",
    }  # fmt: skip


@pytest.mark.parametrize("dotted", ["deepspeed", "deepspeed.zero.Init", "deepspeed.moe.layer.MoE", "deepspeed.utils"])
def test_known_names_have_no_fault(dotted):
    assert fault(dotted) == ""


@pytest.mark.parametrize(
    "dotted", ["deepspeed.zero.Inits", "deepspeed.runtime.nowhere.x", "deepspeed.DeepSpeedEngine.fly", "deepspeed.q"]
)
def test_unknown_names_have_one(dotted):
    assert fault(dotted)
