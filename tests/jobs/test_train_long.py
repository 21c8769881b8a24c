"""The example of long sequences: numbers of ranks of a sequence change no loss, and a run goes on with others."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_long.py"
LINES = 60
SAMPLE = re.compile(r"step (\d+) loss ([\d.]+)")


def told(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return [(int(step), float(loss)) for step, loss in SAMPLE.findall(done.stdout)]


def test_the_numbers_of_ranks_change_no_loss(job, tmp_path):
    small = ("--length", 101, "--stage", 2)  # a length that two and three do not divide
    first = told(job(3, EXAMPLE, *small, "--steps", 10, "--sequence", 3, "--ring", 3, "--out", tmp_path / "cut"))
    second = told(job(2, EXAMPLE, *small, "--steps", 20, "--sequence", 2, "--out", tmp_path / "cut"))
    whole = told(job(1, EXAMPLE, *small, "--steps", 20, "--out", tmp_path / "whole"))
    assert [step for step, _ in whole] == [10, 20]
    for (step, loss), (same, expected) in zip(first + second, whole, strict=True):
        assert (step, abs(loss - expected) <= 2e-3) == (same, True), (loss, expected)  # printed to 3 digits
    assert whole[1][1] < whole[0][1] < 5.6  # that of a byte at random: ln 256


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
