"""Ends of a job of generation before its prompts: the last batch that fits, signals, the file STOP, a dropped batch."""

import json
import os
import signal
import time

import pytest

from mpispeed.generation.counter import NONE, Counter, Report, Stop
from mpispeed.generation.report import Tally
from mpispeed.generation.stopping import SIGNALS, Heed, Plan, Shift, Steward
from mpispeed.mesh import World, solo_comm
from mpispeed.walltime.requests import Asked, SignalWatch


@pytest.fixture
def counter():
    world = World(solo_comm(), solo_comm(), node_count=1)
    made = Counter(world, 5, lambda *_: None)
    yield made
    made.leave(Report())
    made.close()
    world.close()


class End:
    """The end of the job, so many seconds away."""

    def __init__(self, left_seconds):
        self.left_seconds = left_seconds


def watched(counter, folder, left_seconds, *reports):
    """A steward that has looked at least once."""
    tally = Tally(5, 20, 0, 0)
    for report in reports:
        tally.note(0, report)
    steward = Steward(counter, tally, Plan(margin_seconds=10), End(left_seconds), folder)
    steward.start()
    until = time.monotonic() + 5
    while not counter.heed().asked and time.monotonic() < until and left_seconds < 1000:
        time.sleep(0.01)
    steward.close()
    return counter.heed()


def test_no_batch_begins_that_might_not_be_finished(counter, tmp_path):
    longest = Report(0, prompts=4, tokens=9, microseconds=40_000_000)
    counter.ask(Report())
    assert counter.take() == 0
    stop = watched(counter, tmp_path, 59.9, Report(1, 4, 9, 1_000_000), longest)
    assert Asked(stop.asked) is Asked.JOB_END
    assert stop.milliseconds == pytest.approx(54_900, abs=10)  # half of the margin is kept
    counter.ask(Report())
    assert counter.take() == NONE


def test_a_batch_that_fits_is_begun(counter, tmp_path):
    assert not watched(counter, tmp_path, 10_000, Report(0, 4, 9, 40_000_000)).asked
    counter.ask(Report())
    assert counter.take() == 0


def test_the_file_stop(counter, tmp_path):
    (tmp_path / "STOP").touch()
    assert Asked(watched(counter, tmp_path, 999).asked) is Asked.STOP


def test_a_signal_stops_and_leaves_time_to_running_batches(counter, monkeypatch):
    signals = SignalWatch(SIGNALS)
    signals.install()
    try:
        heed = Heed(counter, 0, signals)
        assert not heed.must_drop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not heed.must_drop()
        stop = counter.heed()
        assert (Asked(stop.asked), stop.signal, stop.milliseconds) == (Asked.SIGNAL, signal.SIGUSR1, 60_000)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 59)
        assert not heed.must_drop()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert heed.must_drop()
    finally:
        signals.restore()


@pytest.mark.parametrize(
    ("stop", "finished", "state", "reason"),
    [
        (Stop(), 5, "finished", "all prompts are answered"),
        (Stop(int(Asked.JOB_END)), 3, "interrupted", "the job ends"),
        (Stop(int(Asked.SIGNAL), signal=signal.SIGUSR1, rank=2), 3, "interrupted", "SIGUSR1 on rank 2"),
        (Stop(int(Asked.STOP)), 3, "stopped", "the file STOP"),
        (Stop(int(Asked.JOB_END)), 1, "stopped", "this job made no step"),
    ],
)
def test_what_is_left_for_the_batch_script(tmp_path, monkeypatch, stop, finished, state, reason):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("MPISPEED_WALLTIME", "MPISPEED_RUN_DIR"):
            monkeypatch.delenv(name)
    shift = Shift(Plan(), tmp_path)
    assert not shift.find_rival()
    shift.begin(1)
    shift.end(finished, stop)
    found = json.loads((tmp_path / "state.json").read_text())
    assert (found["state"], found["step"], found["first_step"]) == (state, finished, 1)
    assert reason in found["reason"]


def test_progress_and_summary():
    tally = Tally(10, 40, 2, 8)
    assert tally.progress().startswith("2 of 10 batches, 8 of 40 prompts, 0 tokens/s, time left unknown")
    tally.began -= 10
    tally.note(3, Report(2, prompts=4, tokens=200, microseconds=500_000, waited_microseconds=1500))
    tally.note(1, Report(3, prompts=4, tokens=100, microseconds=900_000, waited_microseconds=900))
    assert tally.progress() == "4 of 10 batches, 16 of 40 prompts, 30 tokens/s, 30 s left"
    assert tally.longest_seconds == 0.9
    assert "2 batches, 8 prompts, 300 tokens" in tally.summary()
    assert "longest wait for a batch 1.5 ms (rank 3)" in tally.summary()
