"""Times of steps for scaling studies: one file when the run ends, only where it was asked for."""

import json
import subprocess
import sys

from mpispeed.base.events import Bus, Event
from mpispeed.monitor import step_times


def test_file_is_written_when_the_run_closes(tmp_path, monkeypatch):
    monkeypatch.setenv(step_times.FILE, str(tmp_path / "steps.json"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    bus = Bus()
    step_times.watch(bus, ranks=2, samples_per_step=8)
    for seconds in (0.5, 0.25):
        bus.announce(Event.STEP_END, seconds=seconds, samples=8)
    assert not (tmp_path / "steps.json").exists()
    bus.announce(Event.CLOSE)
    found = json.loads((tmp_path / "steps.json").read_text())
    assert found == {"ranks": 2, "samples_per_step": 8, "threads": 3, "step_seconds": [0.5, 0.25]}
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


def test_nothing_listens_where_nobody_asked(monkeypatch):
    monkeypatch.delenv(step_times.FILE, raising=False)
    bus = Bus()
    step_times.watch(bus, ranks=2)
    assert not bus.has(Event.STEP_END)


def test_file_is_written_at_the_end_of_a_process_that_closes_nothing(tmp_path):
    code = (
        "from mpispeed.base.events import Bus, Event\n"
        "from mpispeed.monitor.step_times import watch\n"
        "bus = Bus()\n"
        "watch(bus, ranks=1, samples_per_step=1)\n"
        "bus.announce(Event.STEP_END, seconds=1.5, samples=1)\n"
    )
    environ = {step_times.FILE: str(tmp_path / "steps.json"), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    assert json.loads((tmp_path / "steps.json").read_text())["step_seconds"] == [1.5]
