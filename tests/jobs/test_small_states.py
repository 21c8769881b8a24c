"""Codes of states have the same bits at 1 to 4 ranks, and go on with them at another number of ranks."""

import json

WORKER = "tests/jobs/small_states_worker.py"


def trained(job, ranks, *arguments):
    """What a job found, by stage."""
    done = job(ranks, WORKER, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if "FOUND " in line).split("FOUND ")[1])


def test_states_are_equal_at_any_number_of_ranks_also_after_loads(job, tmp_path):
    whole = trained(job, 4, tmp_path, "-", "-", 4)
    first = trained(job, 2, tmp_path, "-", "two", 2)
    for ranks in (1, 3):
        second = trained(job, ranks, tmp_path, "two", "-", 2)
        for stage, (losses, digest) in whole.items():
            assert first[stage][0] + second[stage][0] == losses
            assert second[stage][1] == digest
