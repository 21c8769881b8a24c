"""The example of compression, started as its first lines say: a run goes on elsewhere, and its model gets smaller."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_compressed.py"
LINES = 60


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [(int(step), float(loss), int(bits)) for step, loss, bits in
             re.findall(r"step (\d+) loss ([\d.]+) bits (\d+)", done.stdout)]  # fmt: skip
    (sizes,) = re.findall(r"(\d+) bytes before, (\d+) after; loss ([\d.]+)", done.stdout)
    return steps, int(sizes[1]) / int(sizes[0]), float(sizes[2])


def test_a_run_goes_on_with_other_ranks_and_stages_and_ends_smaller(job, tmp_path):
    first, *_ = told(job(2, EXAMPLE, "--stage", 3, "--steps", 10, "--out", tmp_path))
    second, ratio, loss = told(job(1, EXAMPLE, "--steps", 40, "--out", tmp_path))
    steps, losses, bits = zip(*first, *second, strict=True)
    assert steps == (10, 20, 30, 40) and bits == (10, 9, 9, 8)
    assert losses[3] < losses[0] < 5.6  # that of a byte at random: ln 256
    assert loss < losses[0]
    # Of the weights of blocks half of the inner features is gone, and 2 bytes became 1; the tables stay.
    assert 0.4 < ratio < 0.5


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
