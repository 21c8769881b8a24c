"""Trials of a script in one job of ranks: what is measured, what is left behind, and how each failure is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpispeed.launch.options import Wishes
from mpispeed.tuning.job import SAID, WorkerJob
from mpispeed.tuning.processes import marked
from mpispeed.tuning.protocol import Task
from tests.helpers.memory_group import limited_group
from tests.helpers.system import CHECKOUT

SCRIPT = Path(__file__).with_name("tune_worker.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "csv_monitor": {"enabled": True, "output_path": "never_written"},
}
IS_FULL = os.environ.get("MPISPEED_MATRIX") == "full"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT, "MPISPEED_WATCH_SECONDS": "3"}


class Trials:
    """Runs trials with --do, in a folder of their own."""

    def __init__(self, folder, ranks=2):
        self.folder, self.count = folder, 0
        given = folder / "given.json"
        given.write_text(json.dumps(CONFIG))
        self.words = [str(SCRIPT), "--deepspeed_config", str(given)]
        self.job = WorkerJob(self.words, ranks, folder, wishes=Wishes(variables=ENVIRONMENT))

    def run(self, *more, seconds=400, kind="trial", first=2, last=3, metric="throughput", payload=None, **config):
        self.count += 1
        name = f"t{self.count}"
        words = [*self.words[1:], *more]
        task = Task(
            0, kind, name, str(self.folder / name), {**CONFIG, **config}, words, first, last, metric, payload
        )  # fmt: skip
        return self.job.run(task, seconds)

    def log(self, name="stdout.log"):
        return (self.folder / f"t{self.count}" / name).read_text()

    def facts(self):
        return json.loads(next(line for line in self.log().splitlines() if line.startswith("FACTS"))[6:])

    def marks(self):
        return [f"{SAID}={path / 'watch' / 'said'}" for path in self.folder.glob("job-*")]

    def jobs(self):
        return len(list(self.folder.glob("job-*")))


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    found = Trials(tmp_path_factory.mktemp("trials"))
    with found.job:
        yield found
    assert not [pid for mark in found.marks() for pid in marked(mark)]


def test_a_trial_measures_and_writes_only_into_its_folder(trials, tmp_path, monkeypatch):
    found = trials.run()
    assert (found.status, found.reason) == ("ok", "")
    metrics = found.metrics
    assert metrics["train_batch_size"] == 8
    assert metrics["throughput"] == pytest.approx(8 / metrics["latency"])
    assert 0 < metrics["fwd"] + metrics["bwd"] + metrics["step"] < 2 * metrics["latency"]
    assert metrics["steps"] == 2
    assert 0 < metrics["base_bytes"] <= metrics["peak_bytes"]
    assert trials.log().count("finally") == 1
    assert "STAGE 0 4" in trials.log()
    assert not list(trials.folder.glob("**/never_written"))
    assert not Path("never_written").exists()


def test_a_measurement_may_begin_with_the_first_step(trials):
    first, later = (trials.run(first=step, last=step + 1).metrics for step in (1, 2))
    assert first["steps"] == later["steps"] == 2
    assert first["sent_bytes"] == later["sent_bytes"] > 0, "what the engine sends while it is made does not count"


def test_operations_are_counted_beside_the_measured_steps(trials):
    found = trials.run(metric="flops", gradient_accumulation_steps=2)
    layers = 32 * 64 + 64  # of which the first needs no gradient of its input
    operations = 2 * 4 * 2 * (layers + 2 * layers - 32 * 64)
    assert found.metrics["FLOPS_per_gpu"] == pytest.approx(operations / found.metrics["latency"])
    assert "FLOPS_per_gpu" not in trials.run().metrics


def test_pipelines_are_measured_for_their_slowest_stage(trials):
    found = trials.run("--do", "pipeline", gradient_accumulation_steps=3)
    assert (found.status, found.reason) == ("ok", "")
    assert found.metrics["train_batch_size"] == 4 * 3
    assert 0 < 3 * (found.metrics["fwd"] + found.metrics["bwd"]) < 2 * found.metrics["latency"]
    assert trials.jobs() == 1


def test_a_survey_predicts_for_whole_configs(trials):
    payload = [{**CONFIG, "zero_optimization": {"stage": stage}} for stage in (0, 1, 7)]
    found = trials.run(kind="survey", payload=payload, zero_optimization={"stage": 1})
    assert found.status == "ok", found.reason
    assert found.survey["model"]["num_params"] == 32 * 64 + 64 + 64 + 1
    held = [sum(one["held"].values()) for one in found.survey["forecasts"]]
    assert held[0] > held[1] > held[2] == 0
    assert "zero_optimization.stage" in found.survey["forecasts"][2]["refusal"]
    assert "STAGE" not in trials.log()
    assert trials.run().status == "ok"
    assert trials.jobs() == 1


def test_each_trial_finds_the_process_as_it_was(trials):
    for _ in range(2):  # the first makes what stays, such as the thread of torch's store
        trials.run()
    before = trials.facts()
    for stage in (3, 1):
        assert trials.run("--do", "change", zero_optimization={"stage": stage}).status == "ok"
        assert trials.facts() == before
    assert trials.run().status == "ok"
    assert trials.facts() == before
    assert trials.jobs() == 1
    assert "atexit of the script" in (trials.folder / f"t{trials.count - 1}" / "stdout.log").read_text()


def test_a_config_given_in_code_gets_the_values_of_the_trial(trials):
    own = {"train_batch_size": 8, "optimizer": CONFIG["optimizer"], "zero_optimization": {"stage": 1}}
    trials.words, words = [str(SCRIPT)], trials.words
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    assert trials.run("--in_code", json.dumps(own), **config).status == "ok"
    trials.words = words
    assert "STAGE 2 2" in trials.log()


def test_mistakes_and_short_scripts_are_rows_of_the_same_job(trials):
    found = trials.run(zero_optimization={"stage": 7})
    assert found.status == "error"
    assert "zero_optimization.stage" in found.reason
    found = trials.run("--steps", "1")
    assert found.status == "error"
    assert "ended after 1 global steps, and the measurement begins with step 2" in found.reason
    found = trials.run("--steps", "2")
    assert (found.status, found.metrics["steps"]) == ("ok", 1)
    assert "ended after 2 of 3 global steps" in found.reason
    found = trials.run("--do", "other rows", "--rows", "7")
    assert found.status == "error"
    assert "feeds batches of 7 samples" in found.reason
    found = trials.run("--do", "nothing")
    assert found.status == "error"
    assert "without a call of mpispeed.initialize" in found.reason
    assert trials.jobs() == 1


def test_an_error_of_one_rank_is_named_and_another_job_goes_on(trials):
    jobs = trials.jobs()
    found = trials.run("--do", "raise_one")
    assert (found.status, found.reason) == (
        "error", "rank 1: ValueError: only here and in two lines, while other ranks waited for it",
    )  # fmt: skip
    assert trials.run().status == "ok"
    assert trials.jobs() == jobs + 1


def test_a_hang_is_ended_at_its_limit_with_all_processes(trials):
    began = time.monotonic()
    found = trials.run("--do", "hang", seconds=3)
    assert found.status == "hang"
    assert "3 s, its limit" in found.reason
    assert time.monotonic() - began < 300, "the script sleeps for 600 s"
    assert not [pid for mark in trials.marks() for pid in marked(mark)]


ENDS = {
    "raise": ("error", "ValueError: planted"),
    "memory": ("memory", "MemoryError"),
    "kill": ("killed", "was killed from outside (SIGKILL)"),
    "leave": ("error", "exit code 3"),
    "swallow": ("ok", "the script caught the end of its trial"),
}


@pytest.mark.parametrize("do", ENDS if IS_FULL else ["kill", "swallow"])
def test_other_ends(trials, do):
    status, words = ENDS[do]
    found = trials.run("--do", do)
    assert found.status == status, found
    assert words in found.reason


OUT_OF_MEMORY = """
import json
from pathlib import Path
from tests.jobs.test_tune_worker import Trials

trials = Trials(Path("{folder}"))
with trials.job:
    first = trials.run("--do", "eat")
    second = trials.run()
print(json.dumps([first.status, first.reason, second.status]))
"""


def test_a_rank_that_the_kernel_kills_for_want_of_memory(tmp_path):
    with limited_group(1536 << 20) as (group, reason):
        if group is None:
            pytest.skip(reason)
        (tmp_path / "tuner.py").write_text(OUT_OF_MEMORY.format(folder=tmp_path))
        done = subprocess.run(
            ["bash", "-c", f"echo $$ > {group / 'cgroup.procs'} && exec {sys.executable} {tmp_path}/tuner.py"],
            capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, reason, after = json.loads(done.stdout)
    assert (status, after) == ("memory", "ok"), reason
    assert "rank 1" in reason
    assert "killed by the kernel at the limit of 1.5 GiB" in reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_tuner_end_the_job(tmp_path, number):
    code = f"""
import signal
from pathlib import Path
from tests.jobs.test_tune_worker import Trials
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell that started the tests with &
trials = Trials(Path({str(tmp_path)!r}))
with trials.job:
    trials.run("--do", "hang")
"""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, stderr=subprocess.PIPE)
    log = tmp_path / "t1" / "stdout.log"
    while process.poll() is None and not (log.exists() and "STAGE" in log.read_text()):
        time.sleep(0.1)
    mark = f"{SAID}={tmp_path / 'job-1' / 'watch' / 'said'}"
    assert list(marked(mark))
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not list(marked(mark))
