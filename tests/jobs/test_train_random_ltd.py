"""The example of random-LTD, started as its first lines say: ranks and stage change between runs."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_random_ltd.py"
LINES = 60
SAMPLE = re.compile(r"step (\d+) loss ([\d.]+) kept (\d+) saved ([\d.]+)")


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    found = SAMPLE.findall(done.stdout)
    return [(int(step), float(loss), int(kept), float(saved)) for step, loss, kept, saved in found]


def test_a_run_goes_on_with_other_ranks_and_stage(job, tmp_path):
    first = told(job(2, EXAMPLE, "--stage", 3, "--steps", 20, "--whole-from", 15, "--out", tmp_path))
    second = told(job(1, EXAMPLE, "--stage", 1, "--steps", 40, "--whole-from", 15, "--out", tmp_path))
    rows = first + second
    assert [(step, kept) for step, _, kept, _ in rows] == [(10, 8), (20, 64), (30, 64), (40, 64)]
    losses = [loss for _, loss, _, _ in rows]
    assert losses[1] < losses[0] < 5.6  # that of a byte at random: ln 256
    assert losses[3] < losses[1] and losses[2] < losses[0]  # of other samples each time
    assert rows[-1][3] == round(15 * 5 * (64 - 8) / (40 * 12 * 64), 3)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
