"""What is exported from a record equals what the monitors of the run wrote."""

import json
import subprocess
import sys
import zipfile

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from mpispeed.base.events import Bus, Event
from mpispeed.cli.main import main
from mpispeed.cli.record_export import settings_of
from mpispeed.monitor import attach
from mpispeed.monitor.csv_sink import CsvSink
from mpispeed.monitor.remote import RemoteSinks
from mpispeed.monitor.tensorboard_sink import TensorBoardSink
from mpispeed.record.reader import open_record
from mpispeed.record.writer import RecordWriter
from tests.helpers.services import NOWHERE, comet_points, wandb_points, wandb_records

STEPS = 12


class RecordSink:
    """Gives points of monitors to a record."""

    def __init__(self, writer):
        self.writer = writer

    def write(self, series, value, x):
        self.writer.row(series, value, step=1, samples=x)

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


def train(folder, *sinks, config=None):
    """Events of a run, for monitors and a record in this folder."""
    bus = Bus()
    attach(bus, [*sinks, RecordSink(RecordWriter(folder / "run.h5", {"config": config}))])
    for step in range(1, STEPS):
        loss = float("nan") if step == 5 else 10 / 3 / step
        bus.announce(
            Event.STEP_KNOWN, global_step=step, samples=24 * step, loss=loss, lr=0 if step == 1 else 1e-3 / step,
            norm=1.0, loss_scale=65536.0, skipped=step == 5, seconds=0.1, update_seconds=0.01,
        )  # fmt: skip
        if step % 4 == 0:
            bus.announce(Event.EVAL_END, global_step=step, samples=24 * step, loss=1e300 / 7)
    bus.announce(Event.CLOSE)


@pytest.fixture
def folder(tmp_path):
    """What monitors and a record have of the same run."""
    train(tmp_path, CsvSink(tmp_path / "csv"), TensorBoardSink(tmp_path / "tensorboard"))
    return tmp_path


def export(folder, form):
    with pytest.raises(SystemExit) as ended:
        main(["logs", "record", "export", str(folder / "run.h5"), "--to", form, "-o", str(folder / f"{form} again")])
    assert not ended.value.code
    return folder / f"{form} again"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_csv_files_are_the_same_bytes(folder):
    expected = files(folder / "csv")
    assert len(expected) == 4
    assert files(export(folder, "csv")) == expected


def events(folder):
    """Events without their wall time, as bytes; and the wall times."""
    (path,) = folder.iterdir()
    found, times = [], []
    for event in LegacyEventFileLoader(str(path)).Load():
        times.append(event.wall_time)
        event.wall_time = 0
        found.append(event.SerializeToString(deterministic=True))
    return found, times


def test_tensorboard_events_are_the_same_but_for_their_time(folder):
    expected, _ = events(folder / "tensorboard")
    found, times = events(export(folder, "tensorboard"))
    assert found == expected
    assert len(found) == 1 + 3 * (STEPS - 1) + 2
    # the time of a point is that of the record, not that of the export
    assert times[1:] == open_record(folder / "run.h5").rows["time"].tolist()


# -- services --------------------------------------------------------------------------------------------------

SECTIONS = {
    "wandb": {"enabled": True, "project": "mine", "group": "many", "team": "us"},
    "comet": {"enabled": True, "project": "mine", "workspace": "ours", "samples_log_interval": 40, "api_key": "(set)"},
}


def test_what_services_get_later_is_what_they_would_have_got(tmp_path, monkeypatch):
    environ = {**NOWHERE, "WANDB_X_DISABLE_STATS": "true", "MPISPEED_MONITOR_SECONDS": "60"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "WANDB_MODE", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, RemoteSinks(SECTIONS, tmp_path / "direct"), config=SECTIONS)
    for form, points, where in (("wandb", wandb_points, "."), ("comet", comet_points, "comet")):
        again = tmp_path / form
        words = ("logs", "record", "export", str(tmp_path / "run.h5"), "--to", form, "-o", str(again))
        done = subprocess.run([sys.executable, "-m", "mpispeed", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"to be uploaded by: {'wandb sync' if form == 'wandb' else 'comet upload'} {again}" in done.stdout
        expected, found = points(tmp_path / "direct" / where), points(again / where)
        assert len(expected) == 4
        assert repr(sorted(found.items())) == repr(sorted(expected.items()))
    settings = [next(each for each in run if each["type"] == "run")["run"] for run in wandb_records(tmp_path / "wandb")]
    assert [(run["project"], run["run_group"], run["entity"]) for run in settings] == [("mine", "many", "us")]
    (archive,) = (tmp_path / "comet" / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as found:
        experiment = json.loads(found.read("experiment.json"))
        kinds = {json.loads(line)["type"] for line in found.read("messages.json").splitlines()}
    assert (experiment["project_name"], experiment["workspace"]) == ("mine", "ours")
    assert kinds == {"log_other", "parameter_msg", "metric_msg"}  # nothing of the machine that exports


@pytest.mark.parametrize(
    "config", [None, [], {"comet": 3}, {"comet": {"project": 5, "workspace": "a\x1b", "samples_log_interval": True}}]
)
def test_settings_of_others_are_not_taken_at_their_word(config):
    assert settings_of({"config": config}, "comet") == {}
    assert settings_of({}, "comet") == {}


def test_keys_are_not_among_the_settings():
    assert settings_of({"config": SECTIONS}, "comet") == {
        "project": "mine", "workspace": "ours", "samples_log_interval": 40,
    }  # fmt: skip
