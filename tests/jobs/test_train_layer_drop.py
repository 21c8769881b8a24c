"""The example of progressive layer drop, started as its first lines say: a run goes on at other ranks and stages."""

import math
import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_layer_drop.py"
LINES = 60


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(map(float, each)) for each in re.findall(r"step (\d+) loss ([\d.]+) theta ([\d.]+)", done.stdout)]


def test_a_run_goes_on_with_other_ranks_and_stages(job, tmp_path):
    first = told(job(2, EXAMPLE, "--stage", 3, "--steps", 10, "--of", 100, "--out", tmp_path))
    second = told(job(1, EXAMPLE, "--steps", 20, "--of", 100, "--out", tmp_path))
    steps, losses, thetas = zip(*first, *second, strict=True)
    assert steps == (10, 20)
    assert losses[1] < losses[0] < 5.6  # that of a byte at random: ln 256
    assert thetas == tuple(round(0.5 * math.exp(-(step - 1)) + 0.5, 4) for step in steps)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
