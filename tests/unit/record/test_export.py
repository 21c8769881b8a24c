"""What is exported from a record equals what the monitors of the run wrote."""

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from mpispeed.base.events import Bus, Event
from mpispeed.cli.main import main
from mpispeed.monitor import attach
from mpispeed.monitor.csv_sink import CsvSink
from mpispeed.monitor.tensorboard_sink import TensorBoardSink
from mpispeed.record.reader import open_record
from mpispeed.record.writer import RecordWriter

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


@pytest.fixture
def folder(tmp_path):
    """What monitors and a record have of the same run."""
    bus = Bus()
    record = RecordSink(RecordWriter(tmp_path / "run.h5", {}))
    attach(bus, [CsvSink(tmp_path / "csv"), TensorBoardSink(tmp_path / "tensorboard"), record])
    for step in range(1, STEPS):
        loss = float("nan") if step == 5 else 10 / 3 / step
        bus.announce(
            Event.STEP_END, global_step=step, samples=24 * step, loss=loss, lr=0 if step == 1 else 1e-3 / step,
            norm=1.0, loss_scale=65536.0, skipped=step == 5, seconds=0.1, update_seconds=0.01,
        )  # fmt: skip
        if step % 4 == 0:
            bus.announce(Event.EVAL_END, global_step=step, samples=24 * step, loss=1e300 / 7)
    bus.announce(Event.CLOSE)
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
