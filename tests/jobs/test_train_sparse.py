"""The example of sparse attention, started as its first lines say: it learns, on three ranks."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_sparse.py"
LINES = 60


def test_it_learns(job):
    done = job(3, EXAMPLE, "--stage", 3, "--steps", 20)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout))
    assert second < first < 5.6  # that of a byte at random: ln 256


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
