"""The example of runs that do not depend on the number of ranks, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_invariant.py"
LINES = 60


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return re.findall(r"step (\d+) loss (\S+)", done.stdout)


def differ(*folders):
    command = [sys.executable, "-m", "mpispeed.cli.main", "ckpt", "diff", "--bits", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_two_and_three_ranks_have_the_same_bits(job, tmp_path):
    two, three = tmp_path / "two", tmp_path / "three"
    first = told(job(2, EXAMPLE, "--stage", 3, "--steps", 5, "--out", two))
    assert told(job(3, EXAMPLE, "--steps", 5, "--out", three)) == first
    assert [step for step, _ in first] == ["5"]
    code, text = differ(two, three)
    assert code == 0, text
    assert re.fullmatch(r"(\d+) of \1 tensors are equal\n", text)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
