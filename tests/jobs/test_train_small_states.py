"""The example of states in few bits, started as it says: a run goes on at other ranks, stages and dtypes."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_small_states.py"
LINES = 60


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)]


def test_a_run_goes_on_with_other_ranks_and_dtypes(job, tmp_path):
    first = told(job(2, EXAMPLE, "--stage", 3, "--steps", 10, "--out", tmp_path))
    second = job(1, EXAMPLE, "--steps", 20, "--out", tmp_path, "--states", "bf16", "--masters", "stochastic")
    assert "converted to: masters bf16 (stochastic), optimizer states bf16" in second.stdout + second.stderr
    steps, losses = zip(*first, *told(second), strict=True)
    assert steps == (10, 20)
    assert losses[1] < losses[0] < 5.6  # that of a byte at random: ln 256


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
