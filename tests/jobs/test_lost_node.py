"""Two hosts: their watchdogs compare ranks; when the cable is taken out, all ranks end and each side says why."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import hangs
from tests.helpers.hosts_net import joined_hosts
from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-m", "mpispeed.cli.main", "run")
ENDED_SECONDS = 200.0
"""By when every rank has to have ended after the cut, on a busy machine; without an end of its own it would be 600."""

JOB = """
import time
import torch
import mpispeed
from mpispeed import comm

mpispeed.init_distributed()
for step in range(100000):
    comm.all_reduce(torch.ones(8))
    if step == 20 and comm.get_rank() == 0:
        print("running", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    with joined_hosts(tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


def command(net, folder, *words):
    hosts = folder / "hosts"
    hosts.write_text("h1 slots=1\nh2 slots=1\n")
    return [*RUN, "--hostfile", hosts, "--ssh", net.shell, "--run-dir", folder / "reports", *words]


def environ(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT, **more}


def ranks_on(net, host, script, *, whole=True):
    """Processes of a host with a word on their command line, or with a word that contains it."""
    found = []
    for pid in net.pids(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        is_one = str(script) in words if whole else any(script in word for word in words)
        found += [pid] if is_one else []
    return found


def has_connection(pid):
    """True if the process has a TCP connection that stands."""
    own = set()
    with contextlib.suppress(OSError):  # it opens and closes files, and may end
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(file.readlink().name)
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        return any(row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows)
    return False


def wait_for_watchdogs(net, hosts):
    """Until they know each other; on a busy machine they are behind the ranks."""
    waiting, begin = set(hosts), time.monotonic()
    while waiting:
        assert time.monotonic() - begin < 300, f"no watchdog of {waiting} is connected"
        for host in sorted(waiting):
            if any(has_connection(pid) for pid in ranks_on(net, host, "mpispeed.watchdog.watchdog", whole=False)):
                waiting.discard(host)
        time.sleep(0.2)
    time.sleep(2.0)  # for what they say first


def test_a_cut_link_ends_every_rank_with_an_explanation(net, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    process = net.start("head", command(net, tmp_path, script), env=environ())
    try:
        assert process.stdout.readline().strip() == "running"
        assert ranks_on(net, "h1", script)
        assert ranks_on(net, "h2", script)
        wait_for_watchdogs(net, ["h1", "h2"])
        net.cut("h2")
        begin = time.monotonic()
        while ranks_on(net, "h1", script) or ranks_on(net, "h2", script):
            assert time.monotonic() - begin < ENDED_SECONDS, "a rank still runs"
            time.sleep(0.2)
        net.join("h2")
        _, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert "no word from node h2 (rank 1)" in errors
    assert "rank 0 is in all_reduce (sum) of 8 float32 over world" in errors
    for node, lost in ((0, 1), (1, 0)):
        told = json.loads((tmp_path / "reports" / f"report-node{node}.json").read_text())
        assert (told["kind"], told["ranks"], told["hosts"]) == ("lost node", [lost], [f"h{lost + 1}"])


@pytest.mark.parametrize("way", ["missing", "order", "send"])
def test_ranks_of_two_nodes_are_compared(net, tmp_path, way):
    words = command(net, tmp_path, hangs.WORKER, way)
    code, _, errors = net.run("head", words, env=environ(MPISPEED_WATCH_SECONDS="3"))
    found = hangs.problems(way, code, errors, tmp_path / "reports", 3.0)
    assert not found, "\n".join(found)
    assert (tmp_path / "reports" / "report-node1.json").exists()
