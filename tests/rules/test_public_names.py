"""Guides, README and examples use public names only; the API reference has all of them."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import mpispeed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *(path for name in ("guides", "hpc", "examples") for path in (ROOT / "docs" / name).iterdir()),
]
# Imported for what it does; it is no name of the root, or `from mpispeed import *` would do it.
ACTING = "mpispeed.as_deepspeed"
MODULES = {f"mpispeed.{name}" for name in mpispeed.PUBLIC_MODULES} | {"mpispeed", ACTING}
IMPORT = re.compile(r"^\s*from (mpispeed[\w.]*) import (.+)$|^\s*import (mpispeed[\w.]*)", re.MULTILINE)
DOTTED = re.compile(r"(?<![\w./-])mpispeed(?:\.[A-Za-z_]\w*)+")


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_public(path):
    """True for a public module, a public name of one, or something of a public name."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        known = ".".join(parts[:end])
        if known in MODULES:
            return end == len(parts) or parts[end] in importlib.import_module(known).__all__
    return False


def named(text):
    """Everything of the package that a page imports or spells out."""
    for module, names, plain in IMPORT.findall(text):
        yield from [plain] if plain else (f"{module}.{name.split(' as ')[0].strip(' ()')}" for name in names.split(","))
    yield from (name for name in DOTTED.findall(IMPORT.sub("", text)) if name not in MODULES)


@pytest.mark.parametrize("page", [p for p in PAGES if p.suffix in (".md", ".py")], ids=lambda page: page.name)
def test_pages_use_what_is_public(page):
    hidden = sorted({name for name in named(page.read_text()) if not is_public(name)})
    assert not hidden, f"{hidden}: give them a public home, or tell users of another way"


def test_a_hidden_name_is_found():
    text = "from mpispeed.native.block_io import BlockIO, Options\nuse `mpispeed.zero.Init` and `mpispeed.mesh.comm`"
    assert [name for name in named(text) if not is_public(name)] == [
        "mpispeed.native.block_io.BlockIO", "mpispeed.native.block_io.Options", "mpispeed.mesh.comm",
    ]  # fmt: skip


def test_the_root_shows_type_checkers_the_same_names():
    tree = ast.parse(Path(mpispeed.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.asname for node in block.body for alias in node.names}
    assert shown | {"__version__"} == set(mpispeed.__all__)


def test_type_checkers_see_the_getters_of_engines():
    stub = tool("getter_stub")
    assert stub.PAGE.read_text(encoding="utf-8") == stub.page(), "run: python tools/getter_stub.py"


def test_the_api_reference_is_up_to_date():
    reference = tool("api_reference")
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python tools/api_reference.py"
