"""Every name and key that DeepSpeed documents is the same here, but for two defaults that take less memory."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "coverage.py"
PAGE = ROOT / "docs" / "reference" / "deepspeed-coverage.md"
FACTS = ("deepspeed_names.toml", "deepspeed_keys.toml")
NAMES, KEYS = 265, 283
ZERO = "runtime.zero.config.DeepSpeedZeroConfig"
OTHERWISE = {f"{ZERO}.max_live_parameters", f"{ZERO}.max_reuse_distance"}
"""Documented as 10^9, which keeps all of most models whole; None is what one block and the next need."""


@pytest.fixture(scope="module")
def tried():
    """What the tool prints: it makes `import deepspeed` work, so it gets a process of its own."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
    done = subprocess.run([sys.executable, TOOL, "--json"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chapters():
    lines = (line for name in FACTS for line in (TOOL.with_name(name)).read_text().splitlines())
    return [line.partition("=")[2].strip().strip('"') for line in lines if line.startswith("title")]


@pytest.mark.parametrize("chapter", chapters())
def test_nothing_differs(tried, chapter):
    rows = [row for row in tried["rows"] if row["chapter"] == chapter]
    differing = [
        f"{row['path']}: {row['why']}" for row in rows if row["word"] != "same" and row["path"] not in OTHERWISE
    ]
    assert rows
    assert not differing, "\n".join(differing)


def test_all_documented_rows_are_tried(tried):
    parts = [row["part"] for row in tried["rows"]]
    assert (parts.count("names"), parts.count("keys")) == (NAMES, KEYS)


def test_nothing_is_later_and_two_defaults_differ(tried):
    assert {row["path"]: row["word"] for row in tried["rows"] if row["word"] != "same"} == dict.fromkeys(
        OTHERWISE, "differs"
    )
    assert all(row["why"] == "default None, documented 1000000000" for row in tried["rows"] if row["path"] in OTHERWISE)


def test_the_page_is_up_to_date(tried):
    assert PAGE.read_text(encoding="utf-8") == tried["page"], "run: python tools/coverage.py --markdown"


# -- the comparison itself --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coverage():
    """The tool as a module, with a stand-in for the import that changes this process."""
    stand_in = importlib.util.module_from_spec(importlib.util.spec_from_loader("mpispeed.as_deepspeed", None))
    spec = importlib.util.spec_from_file_location("coverage_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mpispeed.as_deepspeed", stand_in)
        patch.setitem(sys.modules, "coverage_tool", module)
        spec.loader.exec_module(module)
        yield module


def test_a_key_of_a_missing_feature_is_later(coverage):
    key = coverage.Key("", "hybrid_engine.enabled", True, False, {})
    assert coverage.try_key(key) == (coverage.LATER, "the hybrid engine is not available; set enabled to false")


def as_documented(model, lr=0.1, *args, flag=False, **kwargs): ...
def with_more(model, lr=0.1, *args, flag=False, extra=None, **kwargs): ...
def with_more_between(model, device=None, lr=0.1): ...
def renamed(net, lr=0.1, *args, flag=False, **kwargs): ...
def other_default(model, lr=0.2, *args, flag=False, **kwargs): ...
def other_order(lr, model, *args, flag=False, **kwargs): ...
def too_few(model, lr=0.1): ...
def needs_more(model, needed, lr=0.1): ...
def swallowed(model, **kwargs): ...


DOCUMENTED = "(model, lr=0.1, *args, flag=False, **kwargs)"
PLAIN = "(model, lr=0.1)"


@pytest.mark.parametrize(
    ("text", "ours", "fault"),
    [
        (DOCUMENTED, as_documented, ""),
        (DOCUMENTED, with_more, ""),
        (PLAIN, with_more_between, ""),
        (DOCUMENTED, renamed, "model is not parameter 1"),
        (DOCUMENTED, other_default, "lr=0.2, documented 0.1"),
        (DOCUMENTED, other_order, "model is not parameter 1"),
        (DOCUMENTED, too_few, "by position"),
        (PLAIN, needs_more, "missing"),
        (PLAIN, swallowed, "too many"),
        (PLAIN, 3, "cannot be called"),
    ],
)
def test_signatures_are_compared(coverage, text, ours, fault):
    found = coverage.compare(coverage.parse_signature(text), ours)
    assert bool(found) == bool(fault)
    assert fault in found


@pytest.mark.parametrize("text", [DOCUMENTED, "(a, b=[1], *, c=...)", "(**kwargs)", "()"])
def test_signatures_are_read_as_python_reads_them(coverage, text):
    found = coverage.parse_signature(text)
    same = inspect.signature(eval(f"lambda {text[1:-1]}: None"))
    assert str(found) == str(same)


def test_fields_are_compared(coverage):
    class Settings:
        size = 3

        def __init__(self, size=3, length=3):
            self.size = size

    def fault(default, *aliases):
        return coverage.field_fault(Settings, coverage.Name("", "field", "Settings", "size", None, default, aliases))

    assert fault(3, "length") == ""
    assert "documented 4" in fault(4)
    assert "width=3 is refused" in fault(3, "width")
