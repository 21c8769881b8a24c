"""When a job is started again, on which hosts, with how many ranks, and when it is given up."""

import json
import signal
import subprocess
import sys

import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.command import Launch
from mpispeed.launch.hosts import Host
from mpispeed.launch.node_states import NodeStates, lost_nodes
from mpispeed.launch.run_markers import Marks
from mpispeed.launch.supervise import Limits, Prober, Supervisor

HOSTS = (Host("a", (0, 1)), Host("b", (0, 1)), Host("c", (0, 1)))
ANSWERS = ("sh", "-c", '[ ! -e "$0/$1" ] || { echo "down: $1" >&2; exit 1; }')


class Jobs:
    """A supervisor of jobs that end with given codes; keeps what it was told and what was started."""

    def __init__(self, folder, codes, **settings):
        self.folder, self.codes = folder, list(codes)
        self.started, self.said, self.slept = [], [], []
        limits = {"pause_seconds": 1.0, **settings.pop("limits", {})}
        self.supervisor = Supervisor(
            hosts=settings.pop("hosts", HOSTS), plan=self.plan, prober=Prober((*ANSWERS, str(folder)), ()),
            limits=Limits(**limits), say=self.said.append, sleep=self.sleep, **settings,
        )  # fmt: skip

    def plan(self, hosts, restarts):
        self.started.append((restarts, [(host.name, len(host.slots)) for host in hosts]))
        code = self.codes.pop(0)
        if callable(code):
            code()
            code = 9
        return Launch((sys.executable, "-c", f"raise SystemExit({code})"))

    def sleep(self, seconds):
        self.slept.append(seconds)

    def lose(self, *names):
        for name in names:
            (self.folder / name).touch()

    def run(self):
        return self.supervisor.run()


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_ended_on_purpose_is_not_restarted(tmp_path, code):
    jobs = Jobs(tmp_path, [code])
    assert jobs.run() == code
    assert (len(jobs.started), jobs.said) == (1, [])


def test_a_good_end_counts_only_if_no_host_was_lost(tmp_path):
    jobs = Jobs(tmp_path, [0, 0])
    plan = jobs.supervisor.plan

    def lose_one(hosts, restarts):
        jobs.lose("b")
        return plan(hosts, restarts)

    jobs.supervisor.plan = lose_one
    assert jobs.run() == 0
    assert [restarts for restarts, _ in jobs.started] == [0, 1]
    assert "the job seems to have ended well, but b is lost" in jobs.said


def test_a_job_goes_on_with_what_is_left_after_growing_pauses(tmp_path):
    jobs = Jobs(tmp_path, [lambda: jobs.lose("b"), 137, 0])
    assert jobs.run() == 0
    whole, rest = [("a", 2), ("b", 2), ("c", 2)], [("a", 2), ("c", 2)]
    assert jobs.started == [(0, whole), (1, rest), (2, rest)]
    assert jobs.slept == [1.0, 2.0]
    assert "host b does not answer (down: b)" in jobs.said
    assert "restart 1 of 3 on a (2), c (2)" in jobs.said


def test_restarts_and_pauses_have_a_limit(tmp_path):
    limits = {"most_restarts": 4, "longest_pause_seconds": 3.0}
    jobs = Jobs(tmp_path, [1] * 5, limits=limits)
    assert jobs.run() == 1
    assert len(jobs.started) == 5
    assert jobs.slept == [1.0, 2.0, 3.0, 3.0]
    assert "was restarted 4 times; --max-restarts allows no more" in jobs.said[-1]


def test_too_few_hosts_are_waited_for_and_then_given_up(tmp_path):
    jobs = Jobs(tmp_path, [0], limits={"least_nodes": 2})
    jobs.lose("a", "b")
    jobs.supervisor.sleep = lambda _seconds: (tmp_path / "b").unlink()
    assert jobs.run() == 0
    assert jobs.started == [(0, [("b", 2), ("c", 2)])]
    jobs = Jobs(tmp_path, [0], limits={"least_nodes": 3, "wait_seconds": 0.0})
    with pytest.raises(UsageError, match=r"2 of 3 hosts answer, --min-nodes is 3; silent: a \(down: a\)"):
        jobs.run()
    assert not jobs.started


@pytest.mark.parametrize(
    ("counts", "most", "placed"),
    [
        (None, 2, [("a", 2), ("b", 2)]),
        ([1, 2, 5, 7], None, [("a", 2), ("b", 2), ("c", 1)]),
        ([1, 3, 6], 2, [("a", 2), ("b", 1)]),
    ],
)
def test_numbers_of_ranks_are_those_the_config_allows(tmp_path, counts, most, placed):
    jobs = Jobs(tmp_path, [0], counts=counts, limits={"most_nodes": most})
    assert jobs.run() == 0
    assert jobs.started == [(0, placed)]


def test_no_allowed_number_of_ranks_fits(tmp_path):
    jobs = Jobs(tmp_path, [0], counts=[8, 12])
    with pytest.raises(UsageError, match="have 6 slots, but the elasticity section of the config allows 8, 12 ranks"):
        jobs.run()


@pytest.mark.parametrize(
    "limits",
    [{"least_nodes": 0}, {"most_restarts": -1}, {"pause_seconds": -1.0}, {"least_nodes": 3, "most_nodes": 2}],
)
def test_wrong_limits_are_refused(limits):
    with pytest.raises(ConfigError, match="--m"):
        Limits(**limits).check()


def test_a_job_that_was_told_to_end_is_not_restarted(tmp_path):
    jobs = Jobs(tmp_path, [])
    jobs.supervisor.plan = lambda *_: Launch(("sh", "-c", "kill -TERM $PPID; exec sleep 60"))
    assert jobs.run() == 128 + signal.SIGTERM
    assert jobs.said == []


def test_a_lost_host_ends_a_job_that_would_wait_for_it(tmp_path):
    limits = {"beat_seconds": 0.1, "most_restarts": 1, "pause_seconds": 0.0}
    jobs = Jobs(tmp_path, [], limits=limits)
    started = []

    def plan(hosts, restarts):
        started.append([host.name for host in hosts])
        jobs.lose("c")
        return Launch((sys.executable, "-c", "" if restarts else "import time; time.sleep(60)"))

    jobs.supervisor.plan = plan
    assert jobs.run() == 0
    assert started == [["a", "b", "c"], ["a", "b"]]
    assert "lost: c (down: c); ending the job" in jobs.said


def test_this_machine_is_not_asked_over_the_network(tmp_path):
    (tmp_path / "localhost").touch()
    prober = Prober((*ANSWERS, str(tmp_path)), ())
    assert prober.silence([Host("localhost", (0,))]) == {}
    assert Prober(("/no/such/ssh",)).silence([Host("x", (0,))])["x"].startswith("[Errno 2]")
    late = Prober(("sleep", "5"), (), limit_seconds=0.1)
    assert late.silence([Host("9", (0,))]) == {"9": "no answer within 0.1 s"}
    assert subprocess.run([*ANSWERS, str(tmp_path), "there"], check=False).returncode == 0


def test_a_job_is_left_alone_while_no_host_answers_and_given_up_at_last(tmp_path):
    waits = 'while [ ! -e "$0" ]; do sleep 0.05; done'
    for patience, code in ((60.0, 0), (0.3, 143)):
        (tmp_path / "way").mkdir(exist_ok=True)
        limits = {"beat_seconds": 0.05, "most_restarts": 0, "wait_seconds": patience}
        jobs = Jobs(tmp_path / "way", [], limits=limits)
        told = tmp_path / f"told {patience}"

        def say(text, jobs=jobs, patience=patience, told=told):
            jobs.said.append(text)
            if patience > 1:
                told.touch()  # it has been seen, and the job may end

        def plan(hosts, restarts, jobs=jobs, told=told):
            jobs.lose("a", "b", "c")
            return Launch(("sh", "-c", waits, str(told)))

        for file in jobs.folder.iterdir():
            file.unlink()
        jobs.supervisor.plan, jobs.supervisor.say = plan, say
        assert jobs.run() == code
        assert jobs.said.count("no host of the job answers, so it may be the way to them; the job is left alone for "
                               "now") == 1  # fmt: skip
        assert any(text.startswith("lost: a ") for text in jobs.said) is (code != 0)


def test_slurm_is_asked_once_for_all_hosts(tmp_path, monkeypatch):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n. {tmp_path}/says\n')
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = []
    states = NodeStates(said.append)
    (tmp_path / "says").write_text("echo a allocated; echo b down*; echo c 'draining'; echo c draining\n")
    assert states.silence(HOSTS) == {"b": "SLURM says down*"}
    assert (tmp_path / "asked").read_text() == "--noheader --Node --nodes=a,b,c --format=%N %T\n"
    (tmp_path / "says").write_text("echo 'sinfo: error: no controller' >&2; exit 1\n")
    for _ in range(2):
        assert states.silence(HOSTS) == {}
    assert said == ["SLURM does not say how the hosts are (sinfo: error: no controller); none is taken to be lost"]


def test_nodes_that_slurm_has_lost():
    states = {
        "n1": "allocated*",
        "n2": "mixed",
        "n3": "fail",
        "n4": "failing",
        "n5": "down",
        "n6": "down$",
        "n7": "drained",
    }
    assert set(lost_nodes("".join(f"{node} {state}\n" for node, state in states.items()))) == {"n1", "n3", "n5", "n6"}


@pytest.mark.parametrize(("state", "starts"), [("interrupted", 1), ("stopped", 1), ("running", 2), ("", 2)])
def test_a_run_that_says_it_ended_on_purpose_is_not_restarted(tmp_path, state, starts):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "state.json"
    file.write_text(json.dumps({"state": "interrupted"}))  # of a job before
    jobs = Jobs(tmp_path, [], marks=Marks(tmp_path / "run"), limits={"most_restarts": 1})
    (tmp_path / "new").write_text(json.dumps({"state": state}))
    noted = f"import os; os.replace({str(tmp_path / 'new')!r}, {str(file)!r}); "

    def plan(hosts, restarts):
        jobs.started.append(restarts)
        return Launch((sys.executable, "-c", ("" if restarts or not state else noted) + "raise SystemExit(85)"))

    jobs.supervisor.plan = plan
    assert jobs.run() == 85
    assert len(jobs.started) == starts
