"""The example of experts, started as its first lines say: groups of experts and ranks change between runs."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_moe.py"
LINES = 60


def losses(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)]


def test_a_run_goes_on_with_other_groups_and_ranks(job, tmp_path):
    first = losses(job(2, EXAMPLE, "--ep-size", 2, "--stage", 3, "--steps", 20, "--out", tmp_path))
    second = losses(job(1, EXAMPLE, "--ep-size", 1, "--stage", 1, "--steps", 40, "--out", tmp_path))
    assert [step for step, _ in first + second] == [10, 20, 30, 40]
    values = [loss for _, loss in first + second]
    assert values[1] < values[0] < 5.6  # that of a byte at random: ln 256
    assert max(values[2:]) < values[1]


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
