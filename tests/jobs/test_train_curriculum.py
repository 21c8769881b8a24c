"""The example of growing lengths, started as its first lines say: the growth goes on with another number of ranks."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_curriculum.py"
LINES = 60


def told(done):
    """Lengths of every tenth step, and the loss in the end."""
    assert done.returncode == 0, done.stderr[-4000:]
    lengths = [int(length) for length in re.findall(r"step \d+ length (\d+) ", done.stdout)]
    (loss,) = re.findall(r"held out: loss ([\d.]+)", done.stdout)
    return lengths, float(loss)


def test_the_growth_goes_on_with_other_ranks(job, tmp_path):
    first = told(job(2, EXAMPLE, "--grow", 40, "--steps", 20, "--stage", 3, "--out", tmp_path))
    second = told(job(1, EXAMPLE, "--grow", 40, "--steps", 40, "--out", tmp_path))
    assert first[0] + second[0] == [16, 32, 48, 64]
    assert second[1] < first[1] < 5.5  # that of a byte at random: ln 256


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
