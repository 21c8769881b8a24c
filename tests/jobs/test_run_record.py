"""Records of whole jobs: killed, gone on by other ranks, and ended by an error."""

from pathlib import Path

from mpispeed.record.reader import open_record
from mpispeed.record.runs import open_run

WORKER = Path(__file__).with_name("run_record_worker.py")


def kinds(record):
    return [note["kind"] for note in record.notes()]


def test_a_job_that_is_killed_leaves_its_record_and_the_next_one_names_it(job, tmp_path):
    done = job(3, WORKER, "killed", tmp_path, 30)
    assert done.returncode != 0
    killed = open_record(tmp_path / "record" / "run.h5")
    assert killed.lost is None and not killed.is_ended
    assert killed.points("Step/seconds").step.tolist() == list(range(1, 31))
    assert [killed.points("Ranks/step_seconds", rank).step.tolist() for rank in range(3)] == [[1, 10, 20]] * 3
    assert kinds(killed) == ["begin", "save"]
    done = job(2, WORKER, "well", tmp_path, 45)
    assert done.returncode == 0, done.stderr
    follower = open_record(tmp_path / "record" / "run-2.h5")
    assert follower.is_ended and kinds(follower) == ["begin", "follows", "load", "close"]
    assert follower.notes()[1]["run"] == killed.run
    assert follower.points("Step/seconds").step.tolist() == list(range(21, 46))
    run = open_run([tmp_path / "record"])
    assert run.points("Step/seconds").step.tolist() == list(range(1, 46))
    assert run.facts["ranks"]["size"] == 2


def test_the_error_that_ends_a_job_is_in_its_record(job, tmp_path):
    done = job(2, WORKER, "failed", tmp_path, 5)
    assert done.returncode != 0
    record = open_record(tmp_path / "record" / "run.h5")
    assert record.is_ended and kinds(record) == ["begin", "fault", "close"]
    fault, close = record.notes()[1:]
    assert fault["text"] == "ArithmeticError: planted after 5 steps" and "run_record_worker.py" in fault["trace"]
    assert close["state"] == "failed" and close["step"] == 5
