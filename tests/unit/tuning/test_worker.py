"""Parts of a rank of the worker job that need no other rank."""

import os
import subprocess
import sys
import time

import pytest

from mpispeed.tuning.job import limit_of
from mpispeed.tuning.processes import end_all, marked
from mpispeed.tuning.protocol import Task
from mpispeed.tuning.trial import RankTimes, StepTimes, summary
from mpispeed.tuning.worker import laid_values, redirected, words_of


@pytest.mark.parametrize(
    ("words", "arguments", "found"),
    [
        (["s.py", "--deepspeed_config", "a.json"], None, ["s.py", "--deepspeed_config", "F"]),
        (["s.py", "--deepspeed-config=a.json", "-x"], None, ["s.py", "--deepspeed-config=F", "-x"]),
        (["s.py", "--deepspeed", "--config", "a.json"], None, ["s.py", "--deepspeed", "--config", "F"]),
        (["s.py", "--config", "a.yaml", "b.json"], None, ["s.py", "--config", "a.yaml", "b.json"]),
        (["s.py", "--deepspeed", "a.json"], ["--config", "b.json", "-x", "1"], ["s.py", "--config", "F", "-x", "1"]),
        (["-m", "pack.age", "--config", "a.json"], None, ["-m", "pack.age", "--config", "F"]),
        (["-m", "pack.age", "--config", "a.json"], ["--new"], ["-m", "pack.age", "--new"]),
        (["s.py"], None, ["s.py"]),
    ],
)  # fmt: skip
def test_words_of_a_trial(words, arguments, found, tmp_path):
    path = str(tmp_path / "ds_config.json")
    task = Task(1, "trial", folder=str(tmp_path), arguments=arguments)
    assert words_of(words, task) == [word.replace("F", path) for word in found]


def test_what_writes_elsewhere_is_off():
    config = {"csv_monitor": {"enabled": True, "job_name": "x"}, "zero_optimization": {"stage": 1}}
    found = laid_values(config)
    assert found["csv_monitor"] == {"enabled": False, "job_name": "x"}
    assert found["walltime"] == found["tensorboard"] == {"enabled": False}
    assert found["zero_optimization"] == {"stage": 1}
    assert config["csv_monitor"]["enabled"]


def test_output_goes_to_files_also_from_below_python(tmp_path, capfd):
    for number in range(2):
        with redirected(tmp_path):
            os.write(1, f"library {number}\n".encode())
            subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('child')"], check=True)
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"
    assert (tmp_path / "stderr.log").read_text() == "childchild"
    assert (tmp_path / "stdout.log").read_text() == "library 0\nlibrary 1\n"


def test_a_summary_is_of_the_slowest_rank_in_each_step():
    times = [
        RankTimes([StepTimes(9, 9, 9, 9), StepTimes(1, 0.2, 0.4, 0.1), StepTimes(2, 0.2, 0.4, 0.1)], 10, 5, 3, 2, 16),
        RankTimes([StepTimes(9, 9, 9, 9), StepTimes(3, 0.4, 0.2, 0.2), StepTimes(1, 0.6, 0.8, 0.3)], 20, 6, 2, 2, 16),
    ]
    assert summary(times, 2) == pytest.approx({
        "latency": 2.5, "throughput": 6.4, "fwd": 0.25, "bwd": 0.3, "step": 0.25, "peak_bytes": 20, "base_bytes": 6,
        "activation_bytes": 3, "sent_bytes": 0, "steps": 2, "train_batch_size": 16,
    })  # fmt: skip
    assert summary(times, 4) == {}


def test_limits_follow_the_longest_trial_and_surveys_have_the_first_one():
    assert [limit_of("trial", seconds) for seconds in (0.0, 3.0, 100.0)] == [1800.0, 60.0, 500.0]
    assert [limit_of("survey", seconds) for seconds in (0.0, 3.0, 1000.0)] == [1800.0] * 3


def test_marked_processes_are_found_after_their_parents_and_ended():
    mark = f"MPISPEED_SAID=/of/{os.getpid()}"
    words = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"
    name, _, value = mark.partition("=")
    subprocess.run([sys.executable, "-c", words], env={**os.environ, name: value}, check=True)
    while not (found := list(marked(mark))):  # a process that just began may have no environment yet
        time.sleep(0.01)
    assert len(found) == 1
    assert not list(marked(mark + "0"))
    end_all(mark)
    assert not list(marked(mark))
