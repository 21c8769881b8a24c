"""Jobs whose ranks diverge, die or sleep: what the watchdog says, and that it ends them."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import hangs

SLICES = Path(__file__).with_name("slices_worker.py")
WATCH_SECONDS = 3.0


def settings(folder, **more):
    return {"MPISPEED_RUN_DIR": str(folder), "MPISPEED_WATCH_SECONDS": str(WATCH_SECONDS), **more}


@pytest.mark.parametrize("way", hangs.WAYS)
def test_a_divergence_is_named_and_ends_the_job(job, way, tmp_path):
    done = job(hangs.RANKS, hangs.WORKER, way, **settings(tmp_path))
    found = hangs.problems(way, done.returncode, done.stderr, tmp_path, WATCH_SECONDS)
    assert not found, "\n".join(found)


def test_a_failed_pass_that_one_slice_catches_ends_the_job_before_an_update_mixes_batches(job, tmp_path):
    """The sums of its next pass meet those of the failed one on the other rank; then the steps do not fit."""
    done = job(2, SLICES, **settings(tmp_path))
    assert done.returncode == 1, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "caught", "updates 1", "updates 1"]
    assert re.search(r"the job hangs and is ended: ranks 0-1 wait for ever|ranks diverged", done.stderr), done.stderr
    lines = SLICES.read_text().splitlines()
    backward, update = (next(n for n, text in enumerate(lines, 1) if f"# at {mark}" in text) for mark in ("back", "up"))
    assert re.search(rf"rank 0 is in \w+ .* over model at \S*{SLICES.name}:{update} in step", done.stderr), done.stderr
    assert re.search(rf"rank 1 is in \w+ .* over model at \S*{SLICES.name}:{backward} in step", done.stderr)


def test_a_rank_asleep_gives_a_notice_and_the_job_goes_on(job, tmp_path):
    done = job(2, hangs.WORKER, "asleep", "10", **settings(tmp_path))
    assert done.returncode == 0, done.stderr
    sleeps, waits = (hangs.place("asleep", mark) for mark in ("sleeps", "waits"))
    assert re.search(rf"notice: waiting for rank 1 at \S*{sleeps} in asleep since \d+ s", done.stderr)
    assert re.search(rf"rank 0 is in all_reduce .* at \S*{waits}", done.stderr)
    waited = [int(seconds) for seconds in re.findall(rf"notice: .*{sleeps} .* since (\d+) s", done.stderr)]
    assert waited[0] >= WATCH_SECONDS
    assert len(waited) <= 4, "a notice at each doubling; a watchdog that was suspended counts anew"
    assert not list(tmp_path.glob("report*"))


def test_a_rank_that_sleeps_too_long_ends_the_job(job, tmp_path):
    done = job(2, hangs.WORKER, "asleep", "100", **settings(tmp_path, MPISPEED_HANG_TIMEOUT="5"))
    assert done.returncode != 0
    assert hangs.seconds_since_begun(tmp_path) < 60
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["kind"], report["ranks"]) == ("late", [1])
    assert f"{hangs.place('asleep', 'sleeps')}" in report["text"]
    assert report["last_operations"]["0"]
    assert "MPISPEED_HANG_TIMEOUT" in done.stderr


def test_a_limit_that_is_no_time_is_refused_once(job):
    done = job(2, hangs.WORKER, "nothing", MPISPEED_HANG_TIMEOUT="soon")
    assert done.returncode == 2
    assert done.stderr.count("MPISPEED_HANG_TIMEOUT is 'soon'") == 1


def test_nobody_watches_when_that_is_switched_off(job, tmp_path):
    done = job(2, hangs.WORKER, "asleep", "4", **settings(tmp_path, MPISPEED_WATCH="0"))
    assert done.returncode == 0
    assert "notice" not in done.stderr
