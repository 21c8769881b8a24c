"""Scripts of plain torch as whole jobs: the example, without ports, on two hosts; a late rank is named."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.hosts_net import joined_hosts
from tests.helpers.system import CHECKOUT

WORKER = Path(__file__).with_name("torch_worker.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ddp.py"


def losses(out):
    return re.findall(r"step (\d+) of \d+ on (\d+) ranks: loss (\S+)", out)


def place(mark):
    lines = WORKER.read_text().splitlines()
    return next(f"{WORKER.name}:{n}" for n, line in enumerate(lines, 1) if line.endswith(f"# at {mark}"))


@pytest.fixture(scope="module")
def of_two_ranks(job):
    done = job(2, EXAMPLE, "--steps", "12")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return losses(done.stdout)


def test_the_example_learns(of_two_ranks):
    assert [(step, ranks) for step, ranks, _ in of_two_ranks] == [("10", "2"), ("12", "2")]
    assert float(of_two_ranks[-1][2]) < 4.0


@pytest.mark.parametrize("ranks", [1, 3, 4] if os.environ.get("MPISPEED_MATRIX") == "full" else [3])
def test_the_example_runs_on_any_number_of_ranks_sharded(job, ranks):
    done = job(ranks, EXAMPLE, "--steps", "3", "--fsdp")
    assert done.returncode == 0, done.stderr
    assert [found[1] for found in losses(done.stdout)] == [str(ranks)]


def test_sharded_training_has_the_same_losses(job, of_two_ranks):
    done = job(2, EXAMPLE, "--steps", "12", "--fsdp")
    assert done.returncode == 0, done.stderr
    found = [float(loss) for _, _, loss in losses(done.stdout)]
    assert found == pytest.approx([float(loss) for _, _, loss in of_two_ranks], rel=1e-5)  # sums of another shape


def test_no_port_is_opened(job, tmp_path):
    done = job(3, WORKER, "ports", tmp_path, MPISPEED_WATCH="0")
    assert done.returncode == 0, done.stderr
    counts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(counts) == 3
    assert all(before == after for before, after in counts), counts


def test_a_late_rank_in_a_script_of_ddp_is_named(job, tmp_path):
    done = job(
        3, WORKER, "late", "9", MPISPEED_RUN_DIR=str(tmp_path), MPISPEED_WATCH_SECONDS="3", cwd=WORKER.parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"notice: waiting for rank 1 at \S*{place('sleeps')} in late", done.stderr), done.stderr
    assert re.search(rf"rank 0 is in all_reduce for .* at \S*{place('waits')} in late .*waits for rank 1", done.stderr)


@pytest.mark.parametrize("rank", [0, 1] if os.environ.get("MPISPEED_MATRIX") == "full" else [1])
def test_an_error_of_one_rank_is_shown_once_and_ends_the_job(job, tmp_path, rank):
    done = job(2, WORKER, "fails", rank, MPISPEED_RUN_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("ValueError: planted") == 1, done.stderr
    assert f"uncaught error on rank {rank}" in done.stderr


def test_an_operation_that_nobody_else_comes_to_does_not_keep_a_job(job):
    done = job(2, WORKER, "forgets", "it", limit_seconds=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0 ends with 1 started messages that no other rank has answered") == 1, done.stderr


def test_processes_that_ranks_start_meet_by_themselves(job):
    done = job(2, WORKER, "spawns", "them", limit_seconds=300)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"child .*", done.stdout)) == ["child 0 of 2: 2"] * 2 + ["child 1 of 2: 2"] * 2


def test_the_same_script_runs_on_two_hosts(tmp_path, of_two_ranks):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("h1 slots=1\nh2 slots=1\n")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}
    with joined_hosts(tmp_path) as net:
        command = [sys.executable, "-m", "mpispeed.cli.main", "run", "--hostfile", hostfile, "--ssh", net.shell]
        code, out, err = net.run("head", [*command, EXAMPLE, "--steps", "12"], env=environ)
    assert code == 0, out + err
    assert losses(out) == of_two_ranks
