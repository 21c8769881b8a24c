"""The example of distillation: a student that learns from its teacher begins ahead of one that does not."""

import re
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_distilled.py"
LINES = 60


def told(done):
    """Loss of each step that was printed, of the teacher and of the student."""
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"(\w+) step (\d+) loss ([\d.]+)", done.stdout)
    return {
        who: {int(step): float(loss) for each, step, loss in found if each == who} for who in ("teacher", "student")
    }


def test_a_student_learns_from_a_teacher_in_shards(job):
    losses = told(job(2, EXAMPLE, "--taught", 20, "--steps", 10, "--stage", 3))
    assert losses["teacher"][20] < losses["teacher"][10] < 5.6  # that of a byte at random: ln 256
    assert losses["student"][10] < losses["teacher"][10]  # it begins with layers of the teacher


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
