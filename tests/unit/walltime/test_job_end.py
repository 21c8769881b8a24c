"""When a job ends: what is given, what SLURM answers, and answers that are none."""

import logging
import math
import subprocess
import sys
import time

import pytest

from mpispeed.base.units import parse_duration
from mpispeed.walltime import job_end
from mpispeed.walltime.job_end import JobEnd, ask_slurm, job_name, process_age_seconds, read_left

JOB = {"SLURM_JOB_ID": "12"}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(job_end, "process_age_seconds", lambda: 7.0)
    monkeypatch.setattr(logging.getLogger("mpispeed"), "propagate", True)  # for caplog


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90), ("90", 90), ("1.5", 1.5), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400),
        ("1-02:03:04", 93784), (" 30:00 ", 1800),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "nan", "inf", "1-", "UNLIMITED", -1])
def test_no_durations(text):
    with pytest.raises(ValueError, match="expected"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [("0:05\n", 5), ("59:59", 3599), ("1:00:00", 3600), ("2-00:00:01\n", 172801), ("UNLIMITED\n", math.inf)],
)
def test_answers_of_squeue(answer, seconds):
    assert read_left(answer) == seconds


@pytest.mark.parametrize("answer", ["", "\n", "INVALID\n", "NOT_SET", "30", "1:00\n2:00\n"])
def test_answers_that_are_no_time(answer):
    with pytest.raises(ValueError, match=r"found|no time"):
        read_left(answer)


def test_a_task_of_an_array_is_asked_for_by_itself():
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert (job_name(array), job_name(JOB), job_name({})) == ("12_3", "12", "")


def test_what_is_given_counts_from_the_start_of_the_process():
    clock = Clock()
    end = JobEnd(60, {}, clock=clock)
    assert (end.left_seconds, end.source) == (53, "the limit that was given")
    clock.now += 50
    assert end.left_seconds == 3
    clock.now += 50
    assert end.left_seconds == -47
    nobody = JobEnd(None, {}, clock=clock)
    nobody.start()
    assert (nobody.left_seconds, nobody.source) == (math.inf, "nobody")


def test_the_earlier_end_counts_and_limits_may_change():
    clock, answers = Clock(), iter([100.0, 30.0, 500.0])
    end = JobEnd(307, JOB, clock=clock, ask=lambda job: next(answers))
    end.ask()
    assert (end.left_seconds, end.source) == (100, "SLURM")
    end.ask()
    assert end.left_seconds == 30
    end.ask()
    assert (end.left_seconds, end.source) == (300, "the limit that was given")


def test_without_an_answer_what_is_known_stays():
    clock, answers = Clock(), iter([100.0, OSError("gone"), ValueError("INVALID")])

    def ask(job):
        assert job == "12"
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    end = JobEnd(None, JOB, clock=clock, ask=ask)
    end.ask()
    for problem in ("gone", "INVALID"):
        clock.now += 10
        end.ask()
        assert end.problem == problem
    assert end.left_seconds == 80


def test_newer_versions_export_the_end():
    end = JobEnd(None, JOB | {"SLURM_JOB_END_TIME": str(time.time() + 100)}, clock=Clock())
    assert end.left_seconds == pytest.approx(100, abs=5)
    assert JobEnd(None, JOB | {"SLURM_JOB_END_TIME": "soon"}, clock=Clock()).left_seconds == math.inf


def test_an_end_that_a_batch_script_names_counts_if_it_is_earlier(caplog):
    named = {"MPISPEED_JOB_END": str(int(time.time()) + 100)}
    end = JobEnd(3600, named, clock=Clock())
    assert (end.left_seconds, end.source) == (pytest.approx(100, abs=5), "the limit that was given")
    assert JobEnd(57, named, clock=Clock()).left_seconds == 50
    for text in ("soon", "nan", "1700000000"):  # the last one is of a job before
        assert JobEnd(None, {"MPISPEED_JOB_END": text}, clock=Clock()).left_seconds == math.inf
        assert f"MPISPEED_JOB_END={text!r} is no time that lies ahead" in caplog.text


def test_slurm_is_asked_again_beside_training(monkeypatch):
    monkeypatch.setattr(job_end, "ASK_NEAR_SECONDS", 0.01)
    answers = []

    def ask(job):
        answers.append(job)
        return 100.0 - len(answers)

    end = JobEnd(None, JOB, ask=ask)
    end.start()
    deadline = time.monotonic() + 60
    while len(answers) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    end.close()
    asked = len(answers)
    assert asked >= 3
    time.sleep(0.05)
    assert len(answers) == asked, "nobody asks after the end"


def test_a_limit_that_is_changed_and_a_controller_that_comes_back_are_told(monkeypatch, caplog):
    monkeypatch.setattr(job_end, "ASK_NEAR_SECONDS", 0.01)
    monkeypatch.setattr(job_end, "ASK_SECONDS", 0.01)
    answers = [OSError("Unable to contact slurm controller"), 100.0, 100.0, 1000.0, math.inf]

    def ask(job):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    with caplog.at_level(logging.INFO, logger="mpispeed.walltime.job_end"):
        end = JobEnd(None, JOB, ask=ask)
        end.start()
        assert end.problem
        deadline = time.monotonic() + 60
        while len(caplog.records) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        end.close()
    assert [record.getMessage().removeprefix("walltime   ") for record in caplog.records] == [
        "the job ends in 1:40 now, by SLURM", "the job ends in 16:40 now, by SLURM",
        "the job has no end any more, by SLURM",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo INVALID", "no time"),
        ("echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1", "Invalid job id"),
        ("sleep 30", "did not answer"),
        (None, "No such file"),
    ],
)
def test_a_squeue_that_does_not_help(does, says, tmp_path, monkeypatch):
    if says == "did not answer":  # the others do, however long it takes to start them
        monkeypatch.setattr(job_end, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if does else str(tmp_path))
    if does:
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "squeue").chmod(0o755)
    with pytest.raises((OSError, ValueError), match=says):
        ask_slurm("12")
    end = JobEnd(None, JOB)
    end.start()
    assert says in end.problem
    assert end.left_seconds == math.inf
    end.close()


def test_the_age_of_a_process():
    script = (
        "import time; time.sleep(0.5); from mpispeed.walltime.job_end import process_age_seconds as age; print(age())"
    )
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) + 0.02 <= time.monotonic() - before + 0.04
    assert process_age_seconds() > 0
