"""Losses, norms and weights of runs of slots have the same bits at 1 to 4 ranks and all stages."""

import json

import pytest

WORKER = "tests/jobs/invariant_worker.py"


def trained(job, ranks, *arguments):
    """What a job found, by stage and dtype."""
    output = job(ranks, WORKER, *arguments).stdout
    return json.loads(next(line for line in output.splitlines() if "FOUND " in line).split("FOUND ")[1])


def test_ten_steps_are_equal_at_any_number_of_ranks(job, tmp_path):
    expected = trained(job, 1, tmp_path, "-", "-", 10)
    for name, found in expected.items():
        assert found == expected[f"0-{name[2:]}"]
    for ranks in (2, 3, 4):
        assert trained(job, ranks, tmp_path, "-", "-", 10) == expected


@pytest.mark.parametrize("path", [(2, 3, 1)])
def test_a_run_goes_on_at_another_number_of_ranks(job, tmp_path, path):
    whole = trained(job, 1, tmp_path, "-", "-", 6)
    parts = [trained(job, ranks, tmp_path, f"n{at - 1}" if at else "-", f"n{at}", 2) for at, ranks in enumerate(path)]
    for name, (losses, norm, weights) in whole.items():
        assert [loss for part in parts for loss in part[name][0]] == losses
        assert parts[-1][name][1:] == [norm, weights]
