"""Two hosts: their watchers compare ranks; when the cable is taken out, all ranks end and each side says why."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import hangs
from tests.helpers.hosts_net import joined_hosts

ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-m", "mpispeed.cli.main", "run")
ENDED_SECONDS = 60.0
"""By when every rank has to have ended after the cut."""

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
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def ranks_on(net, host, script):
    """Processes of ranks that run on a host."""
    found = []
    for pid in net.pids(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        found += [pid] if str(script) in words else []
    return found


def test_a_cut_link_ends_every_rank_with_an_explanation(net, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    process = net.start("head", command(net, tmp_path, script), env=environ())
    try:
        assert process.stdout.readline().strip() == "running"
        assert ranks_on(net, "h1", script)
        assert ranks_on(net, "h2", script)
        net.cut("h2")
        begin = time.monotonic()
        while ranks_on(net, "h1", script) or ranks_on(net, "h2", script):
            assert time.monotonic() - begin < ENDED_SECONDS, "a rank still runs"
            time.sleep(0.2)
        net.join("h2")
        _, errors = process.communicate(timeout=60)
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
    begin = time.monotonic()
    words = command(net, tmp_path, hangs.WORKER, way)
    code, _, errors = net.run("head", words, env=environ(MPISPEED_WATCH_SECONDS="3"))
    found = hangs.problems(way, code, errors, tmp_path / "reports", time.monotonic() - begin, 3.0)
    assert not found, "\n".join(found)
    assert (tmp_path / "reports" / "report-node1.json").exists()
