"""The example of muP, started as its first lines say: one learning rate fits two widths."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_mup.py"
LINES = 60


def trained(job, ranks, *arguments):
    done = job(ranks, EXAMPLE, "--steps", 20, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    rates = re.search(r"rates \[(.*)\]", done.stdout).group(1)
    return losses, [float(rate) for rate in rates.split(",")]


def test_a_wide_model_learns_with_the_rate_of_a_narrow_one(job):
    narrow, same = trained(job, 2, "--width", 32, "--stage", 1)
    wide, rates = trained(job, 3, "--width", 128, "--stage", 3)
    assert (same, rates) == ([1e-2], [0.25e-2, 1e-2])
    assert narrow[1] < narrow[0] < 5.6  # that of a byte at random: ln 256
    assert max(wide) < 3.3  # as good as the frequencies of bytes after ten steps, and it stays so


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
