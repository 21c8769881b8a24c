"""What a layout of stages, slices and data ranks saved, layouts of other numbers of ranks go on with."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.pipes import LAYOUTS

# `make matrix` loads every layout into every other one
IS_FULL = os.environ.get("MPISPEED_MATRIX") == "full"
WORKER = Path(__file__).with_name("parallel_worker.py")
# ranks that load -> layouts whose checkpoints they load
LOADS = {2: ["p2m2d1", "p2m1d2", "p1m2d2", "p4m1d1"], 1: ["p2m2d1"], 4: ["p1m1d1"]}
SAVES = (1, 4)


def test_any_layout_goes_on_from_any_other(job, tmp_path):
    names = [str(layout) for layout in LAYOUTS]
    loads, saves = (dict.fromkeys((1, 2, 4), names), (1, 2, 4)) if IS_FULL else (LOADS, SAVES)
    unbroken, pairs = {}, []
    for ranks in saves:
        done = job(ranks, WORKER, "save", tmp_path, limit_seconds=300)
        assert done.returncode == 0, done.stderr
        unbroken |= json.loads((tmp_path / f"losses-{ranks}.json").read_text())
    for ranks, sources in loads.items():
        done = job(ranks, WORKER, "load", tmp_path, len(names) if IS_FULL else 1, *sources, limit_seconds=900)
        assert done.returncode == 0, done.stderr
        for source, target, different, losses in json.loads((tmp_path / f"loads-{ranks}.json").read_text()):
            assert not different, f"{source} -> {target}: {different} is not what was saved"
            assert losses == pytest.approx(unbroken[source], rel=1e-5), f"{source} -> {target}"
            pairs.append((source, target))
    assert len(set(pairs)) == len(pairs) == (len(names) ** 2 if IS_FULL else sum(map(len, LOADS.values())))


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("forward", 1, "ZeroDivisionError: planted in a layer"),
        ("backward", 1, "ZeroDivisionError: planted in a layer"),
        ("data", 2, "the data iterator ended after 1 micro-batches of a global batch"),
    ],
)
def test_a_stage_that_fails_ends_the_job(how, code, words, job):
    done = job(3, WORKER, "break", how)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(words) == 1, done.stderr
    assert "came to its end" not in done.stderr
