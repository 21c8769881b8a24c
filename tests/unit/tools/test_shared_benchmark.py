"""benchmarks/gpu/shared.py compares jobs as it says and tells of those that fail; tried on the host, small."""

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def benchmark():
    folders = [str(ROOT / "docs" / "examples"), str(ROOT / "benchmarks" / "gpu")]
    sys.path[:0] = folders
    import shared

    yield shared
    for folder in folders:
        sys.path.remove(folder)
    for name in ("shared", "timing", "gpt", "gpt_layers"):
        sys.modules.pop(name, None)


def options(**more):
    return argparse.Namespace(**{"rounds": 1, "small": True, "device": "cpu", "limit": 120.0} | more)


def test_two_slices_train_like_one_process(benchmark):
    sides = {side.name: side for side in benchmark.SIDES}
    base = benchmark.run(sides["one process, stage 0"], "", options())
    row = benchmark.run(sides["two slices"], "staged", options())
    assert "failed" not in base | row
    benchmark.compare(row, sides["two slices"], {"one process, stage 0": base})
    assert row["loss_difference"] < 1e-3  # bf16: sums in another order
    assert row["times_one_process"] == row["step_seconds"] / base["step_seconds"]
    assert row["is_reached"] == (row["times_one_process"] <= 1.5)
    assert "two slices, staged" in benchmark.shown(row)


@pytest.mark.parametrize(("more", "said"), [({"limit": 0.05}, "its limit"), ({"device": "nowhere"}, "nowhere")])
def test_a_job_that_fails_is_told(benchmark, more, said):
    row = benchmark.run(benchmark.SIDES[0], "", options(**more))
    assert said in row["failed"]
    benchmark.compare(row, benchmark.SIDES[2], {benchmark.SIDES[2].against: row})
    assert "times_one_process" not in row
    assert "failed:" in benchmark.shown(row)
