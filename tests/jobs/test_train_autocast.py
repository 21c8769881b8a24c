"""The example of autocast, started as its first lines say: torch's and Apex's ways, on two and three ranks."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_autocast.py"
LINES = 60


@pytest.mark.parametrize(
    ("mode", "ranks", "stage", "scales", "dtypes"),
    [
        ("bfloat16", 2, 3, {1.0}, "{'torch.float32': "),
        ("O2", 3, 1, {2.0**power for power in range(12, 17)}, "{'torch.float16': "),  # an overflow halves it
    ],
)
def test_it_learns(job, mode, ranks, stage, scales, dtypes):
    done = job(ranks, EXAMPLE, "--mode", mode, "--stage", stage, "--steps", 20)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"step \d+ loss ([\d.]+) scale (\S+) skipped", done.stdout)
    (first, before), (second, after) = found
    assert float(second) < float(first) < 5.6  # that of a byte at random: ln 256
    assert {float(before), float(after)} <= scales
    assert f"parameters: {dtypes}" in done.stdout


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
