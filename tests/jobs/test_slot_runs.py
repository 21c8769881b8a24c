"""Runs of slots with axes and features: losses, norms, weights and moments have the same bits at 2 and 4 ranks."""

import json
import os

from tests.helpers.slot_runs import RUNS

WORKER = "tests/jobs/slot_runs_worker.py"
FEW = ("pipe-3-bf16", "slices-2-bf16", "sequence-1-fp32", "experts-1-fp32", "fp16-2", "own-3-bf16")
"""Each axis once, and what is cheap besides; `make matrix` has all, at 1 and 3 ranks too."""


def trained(job, ranks, folder, names):
    done = job(ranks, WORKER, folder, *(name for name in names if not ranks % RUNS[name].neighbours))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if "FOUND " in line).split("FOUND ")[1])


def test_axes_and_features_do_not_depend_on_the_ranks(job, tmp_path):
    is_full = os.environ.get("MPISPEED_MATRIX") == "full"
    names = tuple(RUNS) if is_full else FEW
    found = [trained(job, ranks, tmp_path / str(ranks), names) for ranks in ((4, 2, 3, 1) if is_full else (4, 2))]
    assert set(found[0]) == set(names)
    for each in found[1:]:
        assert each == {name: found[0][name] for name in each}
    assert all(len(set(losses)) > 1 for losses, _, _ in found[0].values())
