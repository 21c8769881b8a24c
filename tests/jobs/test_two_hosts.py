"""`mpispeed run` on two hosts, which are network namespaces: host files, what reaches a rank, restarts."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from mpispeed.launch.mpirun import Family, identify
from tests.helpers.hosts_net import joined_hosts
from tests.helpers.system import CHECKOUT, cannot
from tests.jobs.elastic_worker import TRAIN_BATCH
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import train_warm

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("elastic_worker.py")
RUN = (sys.executable, "-m", "mpispeed.cli.main", "run")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}

PROBE = """
import json, os, socket, sys
from mpi4py import MPI
names = ("CUDA_VISIBLE_DEVICES", "MPISPEED_INJECT", "MPISPEED_RUN_DIR", "FROM_FILE")
facts = {"rank": MPI.COMM_WORLD.rank, "host": socket.gethostname(), "words": sys.argv[1:], "path": sys.path[:2],
         "cores": sorted(os.sched_getaffinity(0)), "found": [os.environ.get(name) for name in names]}
facts = MPI.COMM_WORLD.gather(facts)
if facts:
    print(json.dumps(facts))
"""

WAITS = """
import os, sys, time
from mpi4py import MPI
comm, restarts = MPI.COMM_WORLD, int(os.environ["MPISPEED_RESTART_COUNT"])
if comm.rank == comm.size - 1 and not restarts:
    open(sys.argv[1] + "/victim", "w").write(str(os.getpid()))
    time.sleep(60)
comm.Barrier()
if comm.rank == 0:
    print(comm.size, "ranks, restart", restarts)
"""

# No MPI in it: the last rank fails when the others are there, and the launcher has to end them.
PLAIN = """
import os, sys, time
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
folder = Path(sys.argv[1])
(folder / os.environ["RANK"]).touch()
while os.environ["RANK"] == "2" and not all((folder / rank).exists() for rank in "01"):
    time.sleep(0.05)
time.sleep(2 if os.environ["RANK"] == "2" else 300)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    with joined_hosts(tmp_path_factory.mktemp("net")) as hosts:
        yield hosts


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two and one\nh1 slots=2\nh2 slots=1\n")
    return path


def open_mpi():
    """Variables under which the Open MPI of this machine is the site's MPI."""
    if identify(Path("/usr/bin/mpirun")).family is not Family.OPEN_MPI:
        cannot("/usr/bin/mpirun is none of Open MPI; apt-get install openmpi-bin")
    return ["--mpi", "site"], {**ENVIRON, "PATH": f"/usr/bin:/bin:{Path(shutil.which('ip')).parent}"}


def losses_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("mpi", "more", "hosts"),
    [
        ("wheel", ["--num_gpus", "1"], ["h1", "h2"]),
        ("Open MPI", [], ["h1", "h1", "h2"]),
    ],
)
def test_training_by_a_host_file(net, hostfile, tmp_path, mpi, more, hosts):
    words, environ = open_mpi() if mpi == "Open MPI" else ([], ENVIRON)
    command = [*RUN, *words, "--hostfile", hostfile, "--ssh", net.shell, *more, WORKER, tmp_path, 3]
    code, out, err = net.run("head", command, env=environ)
    assert code == 0, out + err
    log = losses_of(tmp_path)
    assert [step["hosts"] for step in log] == [hosts] * 3
    expected = train_warm(TinyLM(), batches(3, TRAIN_BATCH))
    assert [step["loss"] for step in log] == pytest.approx(expected, rel=1e-5)  # sums in another order


def probe(net, hostfile, folder, *words, mpi="wheel"):
    site, environ = open_mpi() if mpi == "Open MPI" else ([], ENVIRON)
    script = folder / "probe.py"
    script.write_text(PROBE)
    (folder / ".mpispeed_env").write_text("# all ranks\nFROM_FILE=a b=c\n")
    command = [*RUN, *site, "--hostfile", hostfile, "--ssh", net.shell, *words]
    code, out, err = net.run("head", ["sh", "-c", 'cd "$0"; exec "$@"', folder, *command], env=environ)
    assert code == 0, out + err
    return json.loads(out)


@pytest.mark.parametrize("mpi", ["wheel", "Open MPI"])
def test_what_reaches_a_rank(net, hostfile, tmp_path, mpi):
    words = [
        "--include",
        "h1:0@h2:3,5",
        "--inject",
        "kill:rank=1@step=5",
        "--run-dir",
        "logs",
        "--bind_core_list",
        "0,1",
    ]
    facts = probe(net, hostfile, tmp_path, *words, "probe.py", "it's", "a  $b", mpi=mpi)
    assert [fact["rank"] for fact in facts] == [0, 1, 2]
    assert [fact["host"] for fact in facts] == ["h1", "h2", "h2"]
    assert [fact["cores"] for fact in facts] == [[0, 1], [0], [1]]
    assert all(fact["words"] == ["it's", "a  $b"] for fact in facts)
    assert all(fact["path"] == [str(tmp_path), str(tmp_path)] for fact in facts)
    same = ["kill:rank=1@step=5", str(tmp_path / "logs"), "a b=c"]
    assert [fact["found"] for fact in facts] == [["0", *same], ["3,5", *same], ["3,5", *same]]


@pytest.mark.parametrize("mpi", ["wheel", "Open MPI"])
def test_variables_of_torch_over_hosts(net, hostfile, tmp_path, mpi):
    site, environ = open_mpi() if mpi == "Open MPI" else ([], ENVIRON)
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    words = [*RUN, *site, "--torch-env", "--hostfile", hostfile, "--ssh", net.shell, script, tmp_path]
    code, out, err = net.run("head", words, env=environ)
    assert code == 3, out + err
    lines = sorted(line for line in out.splitlines() if " h1 " in line)
    port = lines[0].split()[-1]
    assert lines == [f"0 3 0 2 0 h1 {port}", f"1 3 1 2 0 h1 {port}", f"2 3 0 1 1 h1 {port}"], out + err


def start_elastic(net, hostfile, folder, *words):
    """Start the job, wait until its last rank can be ended, and return the process and that rank's number."""
    command = [*RUN, "--hostfile", hostfile, "--ssh", net.shell, "--elastic", "--restart-pause", "0.2", *words]
    process = net.start("head", command, env=ENVIRON)
    ends = time.monotonic() + 300

    def victim():
        return (folder / "victim").read_text() if (folder / "victim").exists() else ""

    while not victim() and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    if process.poll() is not None or not victim():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("the job did not reach its pause\n" + "\n".join(process.communicate()))
    return process, int(victim())


def end_of(process):
    try:
        out, err = process.communicate(timeout=300)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, out + err
    assert "host h2 does not answer (no answer from h2)" in err
    assert "restart 1 of 3 on h1 (2)" in err
    return out, err


def test_a_rank_is_killed_and_the_job_goes_on_without_its_host(net, hostfile, tmp_path):
    process, victim = start_elastic(net, hostfile, tmp_path, WORKER, tmp_path, 6, 3)
    net.refuse("h2")
    try:
        os.kill(victim, signal.SIGKILL)
        end_of(process)
    finally:
        net.join("h2")
    log = losses_of(tmp_path)
    assert [(step["step"], step["restarts"]) for step in log] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
    assert [step["hosts"] for step in log] == [["h1", "h1", "h2"]] * 3 + [["h1", "h1"]] * 4
    expected = train_warm(TinyLM(), batches(6, TRAIN_BATCH))
    losses = {step["step"]: step["loss"] for step in log}
    assert [losses[step] for step in range(6)] == pytest.approx(expected, rel=1e-5)


def test_a_host_without_power_is_noticed(net, hostfile, tmp_path):
    """Nobody is told: the connections to it stay open, and the other ranks wait."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    process, _ = start_elastic(net, hostfile, tmp_path, "--host-check", "0.5", script, tmp_path)
    net.fail("h2")
    try:
        out, err = end_of(process)
    finally:
        net.join("h2")
    assert "lost: h2 (no answer from h2); ending the job" in err
    assert out.splitlines()[-1] == "2 ranks, restart 1"
    ends = time.monotonic() + 60
    while net.pids("h1") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not net.pids("h1")  # nothing is left of the first start, whose ranks would wait for ever
