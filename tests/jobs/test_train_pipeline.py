"""The example of pipelines as a user runs it: stages with chunks, then resumed as stages of slices."""

import re
from pathlib import Path

from mpispeed.pipe.schedule import SCHEDULES

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_pipeline.py"
SIZES = {"layers": 4, "heads": 2, "width": 16, "block": 32, "cap_bytes": 50000, "eval_every": 4, "sample": 8}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): validation loss (\S+) ", text, re.M)}


def test_train_and_resume_in_another_layout(job, tmp_path):
    folder = ["--save_dir", tmp_path / "saved"]
    interleaved = ["--stages", 2, "--chunks", 2, "--schedule", "interleaved"]
    first = job(2, SCRIPT, *TINY, *interleaved, "--steps", 8, *folder)
    assert first.returncode == 0, first.stderr
    second = job(4, SCRIPT, *TINY, "--stages", 2, "--slices", 2, "--steps", 16, "--resume", *folder)
    assert second.returncode == 0, second.stderr
    found = losses(first.stdout) | losses(second.stdout)
    assert list(found) == [4, 8, 12, 16]
    assert 5.6 > found[4] > found[8] > found[12] > found[16]
    assert all(run.stdout.splitlines()[-1].startswith("def ") for run in (first, second))


def test_a_schedule_that_there_is_not_is_one_line(job, tmp_path):
    done = job(2, SCRIPT, *TINY, "--schedule", "2f2b", "--save_dir", tmp_path)
    assert done.returncode == 2
    assert all(name in done.stderr for name in SCHEDULES)
    assert "Traceback" not in done.stderr
