"""The example of samples by difficulty, started as its first lines say: samples are the same on other ranks."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_by_difficulty.py"
LINES = 60


def told(done):
    """Step, difficulties and loss in the end, which all ranks compute alike."""
    assert done.returncode == 0, done.stderr[-4000:]
    found = set(re.findall(r"step (\d+) \{'rarity': (\d+), 'variety': (\d+)\} held out: loss ([\d.]+)", done.stdout))
    assert len(found) == 1, done.stdout
    *numbers, loss = found.pop()
    return tuple(map(int, numbers)), float(loss)


def test_a_run_is_that_of_one_rank_also_if_it_goes_on_with_others(job, tmp_path):
    """Other samples, or another order of them, change the loss by more than a hundredth."""
    start = (EXAMPLE, "--grow", 30, "--steps")
    whole = told(job(1, *start, 20, "--out", tmp_path / "one"))
    first = told(job(2, *start, 10, "--out", tmp_path / "more"))
    made = clusters(tmp_path / "more")
    second = told(job(3, *start, 20, "--out", tmp_path / "more"))
    assert [each[0] for each in (first, second, whole)] == [(10, 66, 47), (20, 85, 56), (20, 85, 56)]
    assert second[1] == pytest.approx(whole[1], rel=1e-5)
    assert second[1] < first[1] < 5.5  # that of a byte at random: ln 256
    assert made < clusters(tmp_path / "more") == clusters(tmp_path / "one")


def clusters(folder):
    """Names of the files of clusters, which tell what they are made of."""
    return {path.name for path in (folder / "clusters").glob("*.bin")}


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
