"""`mpispeed run --stage-env`: ranks on one host and on two start from the copy there; it goes, however the job ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpispeed.launch.mpirun import Family, identify
from tests.helpers.hosts_net import joined_hosts
from tests.helpers.small_environment import OF_RUN, small_environment
from tests.helpers.system import cannot

ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
TELLS = """
import json, os, socket, sys
from mpi4py import MPI
import mpispeed
comm = MPI.COMM_WORLD
facts = comm.gather([comm.rank, socket.gethostname(), sys.prefix, os.path.dirname(mpispeed.__file__), sys.path[0]])
if facts:
    print(json.dumps([comm.size, os.environ["MPISPEED_STAGED"], facts]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment that is packed already."""
    found = small_environment(tmp_path_factory.mktemp("environment") / "venv", OF_RUN)
    subprocess.run([found, "-m", "mpispeed", "stage", "pack"], env=ENVIRON, check=True, capture_output=True)
    return found


def script_of(folder, text=TELLS):
    script = folder / "script.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize("mpi", ["wheel", "Open MPI"])
def test_two_hosts_get_it_by_a_broadcast(python, tmp_path, mpi):
    environ, words = ENVIRON, []
    if mpi == "Open MPI":
        if identify(Path("/usr/bin/mpirun")).family is not Family.OPEN_MPI:
            cannot("/usr/bin/mpirun is none of Open MPI; apt-get install openmpi-bin")
        words = ["--mpi", "site"]
        environ = {**ENVIRON, "PATH": f"/usr/bin:/bin:{Path(shutil.which('ip')).parent}"}
    (tmp_path / "hostfile").write_text("h1 slots=2\nh2 slots=1\n")
    script = script_of(tmp_path)
    with joined_hosts(tmp_path / "net") as net:
        command = [python, "-m", "mpispeed", "run", "--stage-env", "--stage-dir", net.disk, *words]
        command += ["--hostfile", tmp_path / "hostfile", "--ssh", net.shell]
        code, out, err = net.run("head", [*command, script], env=environ)
        assert code == 0, out + err
        size, folder, facts = json.loads(out.splitlines()[-1])
        assert size == 3
        assert [fact[1] for fact in facts] == ["h1", "h1", "h2"]
        assert {tuple(fact[2:]) for fact in facts} == {(f"{folder}/venv", f"{folder}/extra/0/mpispeed", str(tmp_path))}
        # A host without room: one sentence, and nothing stays on the other one.
        net.run("h2", ["sh", "-c", f"touch {net.disk}/file"])
        command[command.index(net.disk)] = net.disk / "here"
        net.run("h1", ["mkdir", net.disk / "here"])
        code, out, err = net.run("head", [*command, script], env=environ)
        assert (code, err.count("staging of the environment")) == (2, 1), err
        assert "h2: no place for the environment" in err
        assert "Traceback" not in err
        left = [name for host in ("h1", "h2") for name in net.run(host, ["find", net.disk])[1].split()]
    assert sorted(left) == sorted([f"{net.disk}", f"{net.disk}/here", f"{net.disk}", f"{net.disk}/file"])


FAILS_TWICE = """
import json, os, shutil, socket, sys
from mpi4py import MPI
comm, starts = MPI.COMM_WORLD, int(os.environ["MPISPEED_RESTART_COUNT"])
facts = comm.gather([socket.gethostname(), sys.prefix])
if facts:
    print(json.dumps([starts, facts]), flush=True)
comm.Barrier()
if starts == 1 and socket.gethostname() == "h2":
    shutil.rmtree(os.environ["MPISPEED_STAGED"])
comm.Barrier()
sys.exit(3 * (starts < 2))
"""


def test_an_elastic_job_starts_again_from_the_copies_that_are_there(python, tmp_path):
    """The first restart is on both hosts; then one has lost its copy, as after it was switched off, and is left out."""
    (tmp_path / "hostfile").write_text("h1 slots=1\nh2 slots=1\nno-host slots=1\n")
    with joined_hosts(tmp_path / "net") as net:
        command = [python, "-m", "mpispeed", "run", "--stage-env", "--stage-dir", net.disk, "--elastic"]
        command += ["--restart-pause", "0", "--hostfile", tmp_path / "hostfile", "--ssh", net.shell]
        code, out, err = net.run("head", [*command, script_of(tmp_path, FAILS_TWICE)], env=ENVIRON)
        left = [name for host in ("h1", "h2") for name in net.run(host, ["find", net.disk])[1].split()]
    assert code == 0, out + err
    starts = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    folder = starts[0][1][0][1]
    first, second = ["h1", folder], ["h2", folder]
    assert starts == [[0, [first, second]], [1, [first, second]], [2, [first]]]
    assert err.count("the environment is in") == 1
    assert "host no-host does not answer" in err
    assert re.search(r"host h2 does not answer \(ls: .*No such file", err)
    assert left == [str(net.disk)] * 2


WAITS = """
import os, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    open(sys.argv[1], "w").close()
time.sleep(300)
"""


def started(python, folder):
    """A job of two ranks that have joined and wait, and its copy of the environment."""
    place, mark = folder / "place", folder / "mark"
    place.mkdir()
    words = [
        python,
        "-m",
        "mpispeed",
        "run",
        "--stage-env",
        "--stage-dir",
        place,
        "-n",
        "2",
        script_of(folder, WAITS),
        mark,
    ]
    process = subprocess.Popen(words, env=ENVIRON, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 240
    while not mark.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the ranks did not start: {process.communicate()[1]}")
        time.sleep(0.05)
    (copy,) = place.iterdir()
    return process, copy


def test_a_signal_removes_the_copy(python, tmp_path):
    process, copy = started(python, tmp_path)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM, err
    assert not copy.exists()


def test_a_killed_job_is_cleaned_by_the_next_start_when_its_processes_are_gone(python, tmp_path):
    process, copy = started(python, tmp_path)
    cleans = [python, "-m", "mpispeed", "stage", "clean", "--stage-dir", copy.parent]
    long_ago = time.time() - 3600
    os.utime(copy / "lock", (long_ago, long_ago))
    assert subprocess.run(cleans, env=ENVIRON, capture_output=True, text=True, check=True).stdout == ""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    # Ranks have sessions of their own, and their launcher ends them when it sees that its parent is gone.
    deadline = time.monotonic() + 120
    while copy.exists():
        done = subprocess.run(cleans, env=ENVIRON, capture_output=True, text=True, check=True)
        assert done.stdout in ("", f"{copy}\n")
        for pid in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(copy) in str((pid / "exe").readlink()):
                    os.kill(int(pid.name), signal.SIGKILL)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_that_starts_nothing_stages_nothing(python, tmp_path):
    words = [python, "-m", "mpispeed", "run", "--stage-env", "--stage-dir", tmp_path / "none", "-n", "2"]
    done = subprocess.run(
        [*words, "--dry-run", script_of(tmp_path)], env=ENVIRON, capture_output=True, text=True, check=True
    )
    assert "staged first" in done.stderr
    assert "script.py" in done.stdout
    done = subprocess.run([*words, script_of(tmp_path)], env=ENVIRON, capture_output=True, text=True, check=False)
    assert (done.returncode, "No such file or directory" in done.stderr) == (2, True)
