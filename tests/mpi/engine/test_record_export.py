"""What is exported from the record of a run equals what its monitors wrote."""

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from mpispeed.cli.main import main
from mpispeed.record.runs import open_run
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged

BATCH, STEPS = 36, 4
pytestmark = pytest.mark.mpi(min_size=1)


def record(*words):
    with pytest.raises(SystemExit) as ended:
        main(["logs", "record", *map(str, words)])
    assert not ended.value.code


def events(folder):
    """Events of the only file, without their wall times."""
    (path,) = folder.iterdir()
    found = list(LegacyEventFileLoader(str(path)).Load())
    for event in found:
        event.wall_time = 0
    return [event.SerializeToString(deterministic=True) for event in found]


def test_exports_equal_what_monitors_wrote(mpi_tmp_path, comm, capsys):
    to = {"enabled": True, "output_path": str(mpi_tmp_path)}
    monitors = {name: {**to, "job_name": name} for name in ("csv_monitor", "tensorboard")}
    section = {"enabled": True, "path": str(mpi_tmp_path / "run.h5"), "every": 2}
    engine = start(config(2, BATCH, 1, dtype="fp16", run_record=section, **WARM, **monitors), TinyLM())
    train_averaged(engine, batches(STEPS, BATCH))
    engine.monitor.write_events([("Mine/of a script", 1 / 3, 7)])
    engine.destroy()
    if comm.rank:
        return
    for form, folder in (("csv", "csv_monitor"), ("tensorboard", "tensorboard")):
        record("export", mpi_tmp_path / "run.h5", "--to", form, "-o", mpi_tmp_path / "again" / form)
        own, again = mpi_tmp_path / folder, mpi_tmp_path / "again" / form
        if form == "csv":
            expected = {path.name: path.read_bytes() for path in own.iterdir()}
            assert {path.name: path.read_bytes() for path in again.iterdir()} == expected
            assert len(expected) >= 3
        else:
            assert events(again) == events(own)
    run = open_run([mpi_tmp_path / "run.h5"])
    assert run.last.lost is None
    assert next(info.ranks for info in run.series() if info.name == "Ranks/step_seconds") == tuple(range(comm.size))
    capsys.readouterr()
    record("show", mpi_tmp_path / "run.h5")
    shown = capsys.readouterr().out
    assert f"steps 1-{STEPS}  ended" in shown
    assert "has the most to do" in shown if comm.size > 1 else "has the most to do" not in shown
    record("compare", mpi_tmp_path / "run.h5", mpi_tmp_path / "run.h5")
