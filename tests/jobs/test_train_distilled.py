"""The example of distillation: a student that learns from its teacher begins ahead of one that does not."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_distilled.py"
LINES = 60


def told(done):
    """Loss of each step that was printed, of the teacher and of the student."""
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"(\w+) step (\d+) loss ([\d.]+)", done.stdout)
    return {
        who: {int(step): float(loss) for each, step, loss in found if each == who} for who in ("teacher", "student")
    }


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_student_learns_from_a_teacher_in_shards(job, ranks, stage):
    losses = told(job(ranks, EXAMPLE, "--taught", 20, "--steps", 10, "--stage", stage))
    assert losses["teacher"][20] < losses["teacher"][10] < 5.6  # that of a byte at random: ln 256
    assert losses["student"][10] < losses["teacher"][10]  # it begins with layers of the teacher


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
