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
