"""`mpispeed data build` as a job: killed with all its ranks it goes on; and the example that trains on a store."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpispeed.launch.mpirun import find_mpirun
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens_build.job import Request, build
from tests.helpers.system import CHECKOUT

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_tokens.py"
LINES = 60
BUILD = (sys.executable, "-m", "mpispeed", "data", "build")
WORDS = ("-t", "byte", "--pack", "256", "--columns", "length", "--part-size", "64KiB")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": CHECKOUT}


def started(folder, name, *words, ranks=0):
    under = [str(find_mpirun().path), "-n", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*under, *BUILD, "-o", name, *WORDS, *words, "corpus.jsonl"], env=ENVIRON, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_ranks_that_are_killed_go_on_and_one_tells_of_a_bad_line(tmp_path):
    draw = random.Random(1)
    lines = [json.dumps({"text": "word " * draw.randint(0, 300)}) + "\n" for _ in range(8000)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join([*lines, "[]\n"]))
    killed = started(tmp_path, "all.h5", ranks=2)
    while not (tmp_path / "all.h5.parts" / "part-0000003").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "all.h5").exists()
    again = started(tmp_path, "all.h5", ranks=2)
    said = again.communicate(timeout=400)[1]
    assert again.returncode == 2
    assert said.count(f"corpus.jsonl, line {len(lines) + 1}: it is no object") == 1
    assert len(said.splitlines()) == 1, said
    last = started(tmp_path, "all.h5", "--skip-bad", ranks=2)
    outputs = last.communicate(timeout=400)
    assert last.returncode == 0, outputs
    alone = Request(
        tmp_path / "one.h5", [path], "byte", row=256, columns=("length",), part_bytes=64 << 10, skips_bad=True
    )
    build(solo_comm(), alone)
    assert (tmp_path / "all.h5").read_bytes() == (tmp_path / "one.h5").read_bytes()
    assert re.search(r"\d+ of \d+ parts were there already", outputs[1])
    assert "1 records were left out; the first: " in outputs[1]
    assert "all.h5: " in outputs[0]
    assert not (tmp_path / "all.h5.parts").exists()


def losses(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)]


def test_the_example_builds_a_store_and_goes_on_with_other_ranks(job, tmp_path):
    first = job(2, EXAMPLE, "--steps", 20, "--out", tmp_path)
    assert re.search(r"\d+ tokens of \d+ documents", first.stdout), first.stderr
    second = job(1, EXAMPLE, "--steps", 40, "--out", tmp_path)
    assert "documents" not in second.stdout
    found = losses(first) + losses(second)
    assert [step for step, _ in found] == [10, 20, 30, 40]
    values = [loss for _, loss in found]
    assert values[1] < values[0] < 5.6  # that of a byte at random: ln 256
    assert max(values[2:]) < values[1]


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
