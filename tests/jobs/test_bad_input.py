"""What goes wrong is said once, in one line, with the right exit code; and no rank is left hanging."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("bad_worker.py")

MESSAGES = {
    "unknown_key": ["zero_optimisation", "zero_optimization"],
    "batch": ["train_batch_size", "7"],
    "ranks": ["data_parallel_size", "64"],
    "missing": ["no/such/ds_config.json"],
    "differs": ["ranks [1] have another plan than rank 0: gradient_clipping is 2.0 on rank 1 and 1.0 on rank 0; build"],
}


@pytest.mark.parametrize("how", sorted(MESSAGES))
def test_one_message_and_exit_code_2(job, how):
    done = job(2, WORKER, how)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("mpispeed: error:") == 1, done.stderr
    for word in MESSAGES[how]:
        assert word in done.stderr


def test_one_rank_has_the_same_exit_code(job):
    done = job(1, WORKER, "unknown_key")
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().startswith("mpispeed: error:"), done.stderr


def test_debug_shows_the_traceback(job):
    done = job(2, WORKER, "missing", "--debug")
    assert done.returncode == 2, done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(("ranks", "how"), [(1, "raise"), (3, "raise"), (2, "raise_all")])
def test_a_raising_rank_ends_the_job_with_one_traceback(job, how, ranks):
    done = job(ranks, WORKER, how)
    assert done.returncode not in (0, 2), done.stderr
    assert done.stderr.count("ZeroDivisionError: planted") == 1, done.stderr


def test_a_leaving_rank_ends_the_job(job):
    done = job(2, WORKER, "exit")
    assert done.returncode != 0
