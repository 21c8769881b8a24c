"""The example of Muon, started as its first lines say: ranks and stage change between runs."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_muon.py"
LINES = 60
SHORT = ["--warmup", 4, "--batch", 6]


def loss(done, step):
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(rf"^step {step} validation loss ([\d.]+)$", done.stdout, re.M)
    assert found, done.stdout
    return float(found[1])


def test_a_run_goes_on_with_other_ranks_and_stage(job, tmp_path):
    first = loss(job(2, EXAMPLE, "--steps", 8, "--stage", 3, "--out", tmp_path / "saved", *SHORT), 8)
    second = loss(job(1, EXAMPLE, "--steps", 16, "--stage", 1, "--out", tmp_path / "saved", *SHORT), 16)
    assert second < first < 5.6  # that of a byte at random: ln 256


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
