"""A job that is killed leaves its swap files; the next one on that folder removes them before it looks for space."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("swap_worker.py")


@pytest.mark.parametrize("how", ["kill last", "kill all"])
def test_the_next_job_cleans_up(job, tmp_path, how):
    killed = job(2, WORKER, tmp_path, how)
    assert killed.returncode != 0
    assert "0 before, 2 now" in killed.stdout, killed.stderr
    left = list(tmp_path.glob("*/*/masters.swap"))
    assert len(left) >= (2 if how == "kill all" else 1), killed.stderr
    done = job(2, WORKER, tmp_path, "end")
    assert done.returncode == 0, done.stderr
    assert f"{len(left)} before, 2 now" in done.stdout
    assert list(tmp_path.iterdir()) == []
