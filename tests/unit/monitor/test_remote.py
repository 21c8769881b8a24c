"""The process of Weights & Biases and Comet: what arrives, and what a rank notices of one that hangs or dies."""

import fcntl
import itertools
import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpispeed.monitor import remote, service
from mpispeed.monitor.remote import RemoteSinks
from tests.helpers.services import NOWHERE, comet_facts, comet_points, thinned, wandb_points, wandb_records
from tests.helpers.system import CHECKOUT

KEY = "kY7-distinctive-9Qz-secret"
SECTIONS = {
    "wandb": {"project": "mine", "team": "us", "group": "many"},
    "comet": {
        "project": "mine", "workspace": "ours", "samples_log_interval": 10, "api_key": KEY, "online": True,
        "experiment_name": "small", "experiment_key": "k7" * 16, "mode": "create",
    },
}  # fmt: skip
ENDS = """
import sys
for line in sys.stdin.buffer:
    if b'"close": 60' in line:
        print('{"kind": "end"}')
        break
"""
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch, tmp_path):
    for name, value in {
        **NOWHERE,
        "WANDB_X_DISABLE_STATS": "true",
        "MPISPEED_RUN_DIR": str(tmp_path),
        "MPISPEED_MONITOR_SECONDS": "60",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "WANDB_MODE", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY.ljust(40, "0"))


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "mpispeed.monitor")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def children(pid):
    return [int(n) for path in Path(f"/proc/{pid}/task").glob("*/children") for n in path.read_text().split()]


def wait_until(test, seconds=200.0):
    """The limit only ends a test that would wait for ever: a busy machine takes tens of seconds to load a library."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    return Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def points(count):
    """As a run writes them: the loss before the samples of its step, and numbers that are none."""
    odd = {3: math.nan, 4: math.inf, 5: -math.inf}
    for step in range(count):
        yield "Train/Samples/train_loss", odd.get(step, 1 / (step + 1)), 4 * step
        yield "Train/Samples/lr", 1e-300 * step, 4 * step + 4
    yield "own series", 1.0, 0


def by_series(wanted):
    found = {}
    for series, value, x in wanted:
        found.setdefault(series, []).append((x, value))
    return found


def test_all_points_stand_in_offline_folders_and_no_key_is_shown(tmp_path, said):
    sinks = RemoteSinks(SECTIONS)
    process = Path(f"/proc/{sinks._pid}")
    wait_until(lambda: b"monitor.sender" in (process / "cmdline").read_bytes())
    words, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
    for number, (series, value, x) in enumerate(points(30)):
        sinks.write(series, value, x)
        if number % 3 == 0:
            sinks.flush()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # as a job's end sends them to all processes
        os.kill(sinks._pid, number)
    sinks.close()
    wanted = by_series(points(30))
    assert repr(wandb_points(tmp_path)) == repr(wanted)  # repr: a number that is none equals nothing
    thin = {name: thinned(pairs, 10) for name, pairs in wanted.items()}
    assert repr(comet_points(tmp_path / "comet")) == repr(thin)
    (run,) = (next(r for r in run if r["type"] == "run")["run"] for run in wandb_records(tmp_path))
    assert (run["project"], run["entity"], run["run_group"]) == ("mine", "us", "many")
    facts = comet_facts(tmp_path / "comet")
    assert (facts["project_name"], facts["workspace"], facts["Name"]) == ("mine", "ours", "small")
    assert (facts["offline_id"], facts["resume_strategy"]) == ("k7" * 16, "create")
    one, other = sorted(said())
    assert "comet: written to " in one and f"comet upload {tmp_path}/comet/" in one
    assert "wandb: written to " in other and f"wandb sync {tmp_path}/wandb/offline-run-" in other
    assert all("no answer from http://127.0.0.1:9" in text for text in (one, other))
    own = [entry for entry in variables if KEY.encode() in entry and not entry.startswith(b"WANDB_API_KEY=")]
    assert KEY.encode() not in words and own == []
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert texts and not any(KEY.encode() in text for text in texts)
    assert not is_running(sinks._pid)


def test_a_service_process_that_is_killed_is_begun_anew(tmp_path, said):
    sinks = RemoteSinks({"wandb": {}})
    sinks.write("first series", 0.0, 0)
    sinks.flush()
    files = lambda: tmp_path.rglob("offline-run-*/*.wandb")  # noqa: E731
    wait_until(lambda: any(b"first series" in path.read_bytes() for path in files()))
    (core,) = (pid for pid in children(sinks._pid) if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: not is_running(core))
    count = itertools.count(1)

    def is_begun_anew():
        sinks.write("a", 1.0, next(count))  # some of these are lost with the process
        sinks.flush()
        return any("(begun anew: " in text for text in said())

    wait_until(is_begun_anew)
    last = [(x, x / 3) for x in itertools.islice(count, 10)]
    for x, value in last:
        sinks.write("a", value, x)
        sinks.flush()
    sinks.close()
    found = wandb_points(tmp_path)
    assert found["first series"] == [(0, 0.0)]
    assert found["a"][-10:] == last
    assert "wandb sync" in said()[-1]


def test_a_process_that_does_not_read_slows_no_step_and_ends(said, monkeypatch):
    monkeypatch.setattr(remote, "MOST_BYTES", 1 << 20)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    sinks = RemoteSinks({"wandb": {}}, command=command, close_seconds=0.5)
    begin, slowest = time.monotonic(), 0.0
    for step in range(8000):
        for number in range(5):
            sinks.write(f"Train/Samples/series_{number}", 0.1, step)
        now = time.monotonic()
        sinks.flush()
        slowest = max(slowest, time.monotonic() - now)
    # The process sleeps: whoever waits for it waits so long. The machine may be slow, too.
    assert time.monotonic() - begin < 500 and slowest < 50
    begin = time.monotonic()
    sinks.close()
    assert time.monotonic() - begin < 500
    dropped, ended = said()
    assert "takes no points; from now on they are dropped" in dropped
    assert "did not end within 0.5 seconds and is stopped" in ended and " points were dropped" in ended
    assert not is_running(sinks._pid)
    sinks.write("a", 1.0, 1)
    sinks.flush()
    sinks.close()
    assert len(said()) == 2


def test_the_end_waits_5_seconds_or_as_many_as_are_asked_for(said, monkeypatch):
    monkeypatch.setenv("MPISPEED_MONITOR_SECONDS", "soon")
    assert RemoteSinks({}, command=["/no/such/program"])._close_seconds == 5.0
    assert "MPISPEED_MONITOR_SECONDS is soon, which is no number of seconds; 5 are used" in said()[0]
    monkeypatch.setenv("MPISPEED_MONITOR_SECONDS", "0.3")
    begin = time.monotonic()
    RemoteSinks({}, command=SLEEPS).close()
    assert 0.25 < time.monotonic() - begin < 50  # the process sleeps for 60


def test_a_process_with_very_many_files_ends_its_run_as_well(said):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    sinks = RemoteSinks({"wandb": {}}, command=[sys.executable, "-c", ENDS])
    for name in ("_in", "_out"):
        low = getattr(sinks, name)
        setattr(sinks, name, fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500))
        os.close(low)
    sinks.write("a", 1.0, 1)
    sinks.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said() == [] and not is_running(sinks._pid)


def test_one_warning_tells_of_a_process_that_died(said):
    sinks = RemoteSinks({"wandb": {}, "comet": {}}, command=[sys.executable, "-c", "pass"])
    wait_until(lambda: not is_running(sinks._pid))
    for step in range(3):
        sinks.write("a", 1.0, step)
        sinks.flush()
    sinks.close()
    assert said() == ["wandb, comet: nothing more is sent, the process for it ended"]


def test_a_process_that_cannot_be_started_ends_nothing(said):
    sinks = RemoteSinks({"wandb": {}}, command=["/no/such/program"])
    sinks.write("a", 1.0, 1)
    sinks.flush()
    sinks.close()
    (text,) = said()
    assert "wandb: nothing is sent, the process for it cannot be started" in text


def test_when_the_rank_is_killed_the_rest_is_written(tmp_path):
    script = (
        "import os, sys, json, signal\n"
        "from mpispeed.monitor.remote import RemoteSinks\n"
        "sinks = RemoteSinks(json.loads(sys.argv[1]))\n"
        "for x in range(50):\n"
        "    sinks.write('a', x / 3, 10 * x)\n"
        "    sinks.flush()\n"
        "print(sinks._pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environ = {**os.environ, "PYTHONPATH": CHECKOUT}
    words = [sys.executable, "-c", script, json.dumps(SECTIONS)]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)  # ends: no pipe is kept open
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not is_running(int(done.stdout)))
    wanted = [(10 * x, x / 3) for x in range(50)]
    assert wandb_points(tmp_path)["a"] == comet_points(tmp_path / "comet")["a"] == wanted
    (run,) = wandb_records(tmp_path)
    assert [record["exit"]["exit_code"] for record in run if record["type"] == "exit"] == [1]


def test_a_forked_process_sends_and_closes_nothing(said):
    sinks = RemoteSinks({"wandb": {}}, command=SLEEPS, close_seconds=0.2)
    pid = os.fork()
    if not pid:
        sinks.write("a", 1.0, 1)
        sinks.flush()
        sinks.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert is_running(sinks._pid)
    sinks.close()
    assert len(said()) == 1


def test_no_answer_is_told_from_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "no answer from" in service.unreachable(address, 0.2)  # it takes connections and says nothing
    assert "refused" in service.unreachable("http://127.0.0.1:9", 0.5)
    assert "no answer" in service.unreachable("nonsense", 0.5)


def test_programs_that_are_no_ranks_write_by_the_same_sinks(tmp_path):
    """In a process of its own: the libraries change it."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from mpispeed.monitor.comet_sink import CometSink\nfrom mpispeed.monitor.wandb_sink import WandbSink\n"
        "for kind in (WandbSink, CometSink):\n"
        "    sink = kind({'samples_log_interval': 1}, Path(sys.argv[1]))\n"
        "    for x in range(300):\n"
        "        sink.write('a/b', x / 7, 2 * x, time=1.5e9 + x)\n"
        "        sink.write('c', -x / 3, 2 * x)\n"
        "    sink.flush()\n"
        "    sink.close()\n"
    )
    environ = {
        **os.environ, "PYTHONPATH": CHECKOUT, "WANDB_DIR": str(tmp_path / "other"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    wanted = {"a/b": [(2 * x, x / 7) for x in range(300)], "c": [(2 * x, -x / 3) for x in range(300)]}
    assert wandb_points(tmp_path) == comet_points(tmp_path / "comet") == wanted
    (records,) = wandb_records(tmp_path)
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [row["_timestamp"] for row in rows] == [1.5e9 + x for x in range(300)]
