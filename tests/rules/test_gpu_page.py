"""The page of figures of GPUs is that of the records, and knows every benchmark."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {path.stem.replace("_", "-") for path in (ROOT / "benchmarks" / "gpu").glob("*.py")} - {"timing"}


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("gpu_figures", ROOT / "tools" / "gpu_figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_is_made_of_the_records(figures):
    assert figures.PAGE.read_text(encoding="utf-8") == figures.page(), "run: python tools/gpu_figures.py"


def test_each_benchmark_has_figures_and_each_record_a_benchmark(figures):
    assert set(figures.KINDS) >= SCRIPTS
    assert {name for name, _ in figures.records(figures.RESULTS)} <= SCRIPTS
    for name, record in figures.records(figures.RESULTS):
        assert figures.figures(name, record), name


def test_goals_are_judged(figures, tmp_path):
    """Of the two benchmarks that have not run on a GPU yet, with rows as they write them."""
    shared = [
        {"side": "one process, stage 3", "ranks": 1, "path": "", "step_seconds": 0.1, "losses": [2.0]},
        {"side": "two ranks, stage 3", "ranks": 2, "path": "mapped", "step_seconds": 0.12, "losses": [2.0],
         "times_one_process": 1.2, "target": 1.3, "is_reached": True, "loss_difference": 0.0},
        {"side": "two slices", "ranks": 2, "path": "staged", "failed": "why"},
    ]  # fmt: skip
    offload = [
        {"side": "plain torch", "step_seconds": 0.1, "over_plain": 1.0, "last_loss": 2.0},
        {"side": "stage 2", "step_seconds": 0.1, "over_plain": 1.0, "last_loss": 2.0},
        {"side": "stage 2, optimizer", "step_seconds": 0.17, "over_plain": 1.7, "last_loss": 2.0},
        {"side": "stage 3, optimizer in files", "step_seconds": 1.2, "over_plain": 12.0, "over_disk_in_turns": 1.2},
        {"side": "disk alone, in turns", "step_seconds": 1.0, "over_plain": 10.0},
    ]
    for name, rows in (("shared", shared), ("offload", offload)):
        record = {"device": "card", "date": "2026-01-01T00:00:00", "commit": "c", "torch": "t", "results": rows}
        (tmp_path / f"gpu-{name}.json").write_text(json.dumps(record))
    assert figures.goals(tmp_path) == [
        "missed: offload: stage 2, optimizer, over plain torch: 1.70 x, 170.00 ms (goal: at most 1.60 x)",
        "reached: offload: stage 3, optimizer in files, over the disk's own time: 1.20 x, 1200.00 ms "
        "(goal: at most 1.30 x)",
        "reached: shared: two ranks, stage 3, mapped, over one process: 1.20 x, 120.00 ms (goal: at most 1.30 x)",
        "missed: shared: two slices, staged: failed (goal: )",
    ]
    made = figures.page(tmp_path)
    assert "| one process, stage 3 | 100.00 ms |  |  |" in made
    assert "Not run on a GPU yet: `gpu/attention.py`" in made
