"""Lightning's Trainer with the strategy "mpispeed": losses are those of a loop of plain torch on one process."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "lightning_worker.py"
JOBS = {2: "fits", 3: "resumes"}
BOUND = 1e-5


@pytest.fixture(scope="module")
def found(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    for ranks, what in JOBS.items():
        done = job(ranks, WORKER, what, folder, PYTHONWARNINGS="ignore")
        assert done.returncode == 0, done.stderr[-4000:]
    return {ranks: json.loads((folder / f"found{ranks}.json").read_text()) for ranks in JOBS}


def assert_same(ours, plain, bound=BOUND, first=0):
    assert ours["losses"] == pytest.approx(plain["losses"][first:], rel=bound)
    for name in ("val", "validated", "tested"):
        assert ours[name] == pytest.approx(plain["val"], rel=bound)


@pytest.mark.parametrize("what", [*(f"stage {stage}" for stage in range(4)), "name"])
def test_losses_are_those_of_plain_torch(found, what):
    ours = found[2][what]
    assert (ours["ranks"], ours["step"], ours["rate"]) == (2, 8, 5e-3)
    assert_same(ours, found[2]["plain"])


def test_bf16_is_near(found):
    assert found[2]["bf16"]["losses"] != found[2]["plain"]["losses"]
    assert_same(found[2]["bf16"], found[2]["plain"], 3e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_of_two_ranks_goes_on_with_three(found, stage):
    ours = found[3][f"stage {stage}"]
    assert (ours["ranks"], ours["step"], ours["rate"]) == (3, 8, 5e-3)
    assert_same(ours, found[2]["plain"], first=4)
