"""What 4 ranks saved with experts shared out in any layout, other numbers of ranks go on with."""

import json
import os
from pathlib import Path

import pytest

# `make matrix` saves every layout and loads each into every other one
IS_FULL = os.environ.get("MPISPEED_MATRIX") == "full"
WORKER = Path(__file__).with_name("expert_reshard_worker.py")
NAMES = () if IS_FULL else ("ep4-plain-z2", "ep2-pipeline-z0")
RANKS, LOADS = ((1, 2, 3, 4), 8) if IS_FULL else ((3,), 1)


def test_any_layout_of_experts_into_any_other(job, tmp_path):
    (tmp_path / "swap").mkdir()
    done = job(4, WORKER, "save", tmp_path, *NAMES, limit_seconds=600)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "losses.json").read_text())
    assert len(saved) == len(NAMES) or IS_FULL
    for name, (unbroken, again) in saved.items():
        assert again == unbroken, f"{name} does not go on to the bit"
    for ranks in RANKS:
        done = job(ranks, WORKER, "load", tmp_path, LOADS, *saved, limit_seconds=900)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / f"loads-{ranks}.json").read_text())
        assert len(rows) >= len(saved)
        for source, target, different, losses in rows:
            which = f"{source} -> {target} on {ranks} ranks"
            assert not different, f"{which}: {different} is not what was saved"
            # fp32: only the order of sums differs
            assert losses == pytest.approx(saved[source][0], rel=1e-5), which


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("forward", 1, "ZeroDivisionError: planted in an expert"),
        ("backward", 1, "ZeroDivisionError: planted in an expert"),
        ("caught", 2, "the ranks are at different calls"),
    ],
)
def test_an_expert_that_fails_on_one_rank_ends_the_job(how, code, words, job, tmp_path):
    watch = {"MPISPEED_RUN_DIR": str(tmp_path), "MPISPEED_WATCH_SECONDS": "3"}
    done = job(2, WORKER, "break", how, limit_seconds=120, **watch)
    assert done.returncode == code, done.stderr
    assert 1 <= done.stderr.count(words) <= (2 if how == "caught" else 1), done.stderr  # both ranks may notice it
    assert "came to its end" not in done.stderr
