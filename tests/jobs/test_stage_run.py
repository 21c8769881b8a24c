"""`mpispeed run --stage-env` on this node: what ranks open, what is packed once, what is left at the end."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.environment_copy import FOR_LAUNCHER, make_environment
from tests.helpers.file_trace import WORDS, parse, running
from tests.helpers.system import cannot

WORKER = Path(__file__).with_name("stage_worker.py")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An environment without torch, which these ranks do not need."""
    folder = tmp_path_factory.mktemp("shared") / "all"
    make_environment(folder, folder, FOR_LAUNCHER)
    return folder


def words(shared, *more):
    return [str(shared / "env/bin/python"), "-m", "mpispeed", "run", "-n", "2", "--stage-env", str(WORKER), *more]


def variables(place):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "MPISPEED_STAGE_DIR": str(place), "OMP_NUM_THREADS": "1"}


def archives(shared):
    return [(path, path.stat().st_mtime_ns) for path in shared.rglob("environment-*.tar")]


def test_ranks_open_nothing_of_the_environment_that_was_packed(shared, tmp_path):
    if shutil.which("strace") is None:
        cannot("opens of files are counted by strace: apt-get install strace")
    first = subprocess.run(words(shared), env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    packed = archives(shared)
    assert len(packed) == 1
    trace = tmp_path / "trace"
    traced = [*WORDS, "-o", str(trace), *words(shared)]
    second = subprocess.run(traced, env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert archives(shared) == packed
    (line,) = second.stdout.splitlines()
    places = json.loads(line)
    staged = Path(places[0][2])
    assert staged.parent == tmp_path
    assert {Path(path).is_relative_to(staged) for python, module, *_ in places for path in (python, module)} == {True}
    ranks = running(parse(trace.read_text()), staged, WORKER.name)
    opened = [path for rank in ranks for path in (*rank.opened, *rank.refused)]
    assert sum(path.startswith(str(staged)) for path in opened) > 2 * 100  # the trace has seen the ranks
    assert [path for path in opened if path.startswith(str(shared))] == []
    assert not list(tmp_path.glob("mpispeed-env-*"))


def test_a_folder_in_use_stays_and_goes_with_a_signal(shared, tmp_path):
    ready = tmp_path / "ready"
    process = subprocess.Popen(words(shared, str(ready)), env=variables(tmp_path), stdout=subprocess.PIPE, text=True)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.05)
    (folder,) = tmp_path.glob("mpispeed-env-*")
    old = time.time() - 3600
    os.utime(folder / "lock", (old, old))
    other = subprocess.run(words(shared), env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert other.returncode == 0, other.stderr
    assert folder.exists()  # it is in use, however old
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=400)
    assert process.returncode
    assert json.loads(out.splitlines()[0])
    assert not list(tmp_path.glob("mpispeed-env-*"))


def test_what_a_killed_launcher_has_left_goes_with_the_next_start_after_its_ranks(shared, tmp_path):
    ready = tmp_path / "ready"
    process = subprocess.Popen(words(shared, str(ready)), env=variables(tmp_path), stdout=subprocess.PIPE, text=True)
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.05)
    places = json.loads(process.stdout.readline())
    process.kill()
    process.wait()
    for *_, rank in places:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    process.stdout.close()
    (left,) = tmp_path.glob("mpispeed-env-*")
    old = time.time() - 3600
    os.utime(left / "lock", (old, old))
    again = subprocess.run(words(shared), env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert not left.exists()
