"""The record of a run: rank 0 writes what all ranks did, and nothing about the training changes."""

import json
import stat
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.engine.rank_numbers import NAMES
from mpispeed.record import layout
from tests.helpers.covering import on_ranks
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, start, train_averaged, weights

BATCH = 36
pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(autouse=True)
def without_run_folder(monkeypatch):
    monkeypatch.delenv("MPISPEED_RUN_DIR", raising=False)


def settings(stage, folder, dtype="fp32", every=2, **more):
    section = {"enabled": True, "path": str(folder), "every": every}
    return config(stage, BATCH, 1, dtype=dtype, run_record=section, **WARM, **more)


def read(path):
    """Rows, points as (step, value) by series and rank, notes and facts, by plain h5py."""
    with h5py.File(path, locking=False) as file:
        state = layout.latest_state(file["state"][...].tobytes())
        names = file["names"][: state.counts["names"]].tobytes().decode().splitlines()
        rows = file["rows"][: state.counts["rows"]]
        notes = [json.loads(line) for line in file["notes"][: state.counts["notes"]].tobytes().splitlines()]
        facts = {name: json.loads(file["facts"][name][...].tobytes()) for name in file["facts"]}
    points = {}
    for row in rows:
        points.setdefault((names[row["series"]], int(row["rank"])), []).append((int(row["step"]), float(row["value"])))
    return SimpleNamespace(state=state, rows=rows, points=points, notes=notes, facts=facts)


@pytest.mark.parametrize(("stage", "dtype"), on_ranks([0, 1, 2, 3], ["fp32", "bf16"]))
def test_a_recorded_run_is_the_same_run_and_its_record_has_all_ranks(stage, dtype, mpi_tmp_path, comm):
    data = batches(5, BATCH)
    plain = start(config(stage, BATCH, 1, dtype=dtype, **WARM), TinyLM())
    losses, expected = train_averaged(plain, data), weights(plain)
    sent = plain.mesh.comm_trace.total_bytes()
    plain.destroy()
    monitor = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "csv"}
    engine = start(settings(stage, mpi_tmp_path / "runs", dtype, csv_monitor=monitor), TinyLM())
    assert train_averaged(engine, data) == losses
    same_bits(weights(engine), expected)
    told = 3 * len(NAMES) * 8 * (comm.size - 1)  # what ranks tell of themselves, in three of the steps
    assert engine.mesh.comm_trace.total_bytes() == sent + told
    engine.destroy()
    if engine.mesh.rank == 0:
        path = mpi_tmp_path / "runs" / "run.h5"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        check(read(path), comm.size, mpi_tmp_path / "csv")


def check(record, ranks, csv):
    assert record.state.is_ended and not record.state.dropped
    assert [note["kind"] for note in record.notes] == ["begin", "close"]
    assert record.facts["ranks"]["size"] == ranks and record.facts["config"]["train_batch_size"] == BATCH
    assert record.facts["model"]["parameters"] == sum(param.numel() for param in TinyLM().parameters())
    for series in ("Step/seconds", "Step/update_seconds", "Step/gradient_norm", "Train/Samples/train_loss"):
        assert [step for step, _ in record.points[series, 0]] == [1, 2, 3, 4, 5]
    for rank in range(ranks):
        for series in NAMES[:4]:
            steps, values = zip(*record.points[series, rank], strict=True)
            assert steps == (1, 2, 4) and min(values) >= 0
        assert min(value for _, value in record.points["Ranks/resident_bytes", rank]) > 1e7
    assert not any(rank >= ranks for _, rank in record.points)
    step_seconds = dict(record.points["Step/seconds", 0])
    means = dict(record.points["Ranks/step_seconds", 0])
    assert means[2] == step_seconds[2] and means[4] == pytest.approx((step_seconds[3] + step_seconds[4]) / 2)
    sums = [name for name, _ in record.points if name.startswith("Communication/all_reduce/")]
    calls = [[value for _, value in record.points[name, 0]] for name in sums if name.endswith("/calls")]
    assert calls == list(map(sorted, calls)) and sum(last for *_, last in calls) >= 5
    # what the CSV monitor wrote, line for line
    for path in csv.iterdir():
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        series = next(name for name, _ in record.points if path.stem.endswith(name.replace("/", "_")))
        assert [value for _, value in record.points[series, 0]] == table[:, 1].tolist()


@pytest.mark.ranks(1, 3)
def test_a_run_that_goes_on_has_a_record_of_its_own_that_names_the_one_before(mpi_tmp_path):
    for number in (1, 2):
        engine = start(settings(1, mpi_tmp_path), TinyLM())
        if number == 2:
            engine.load_checkpoint(str(mpi_tmp_path / "ckpt"))
        train_averaged(engine, batches(3, BATCH))
        engine.save_checkpoint(str(mpi_tmp_path / "ckpt"))
        engine.destroy()
    if engine.mesh.rank:
        return
    first, second = read(mpi_tmp_path / "run.h5"), read(mpi_tmp_path / "run-2.h5")
    assert [note["kind"] for note in first.notes] == ["begin", "save", "close"]
    assert [note["kind"] for note in second.notes] == ["begin", "follows", "load", "save", "close"]
    with h5py.File(mpi_tmp_path / "run.h5", locking=False) as file:
        assert second.notes[1]["run"] == file.attrs["run"].decode()
    assert second.notes[1]["file"] == str(mpi_tmp_path / "run.h5")
    assert first.notes[1]["tag"] == second.notes[2]["tag"] == "global_step3" and second.notes[2]["step"] == 3
    assert [step for step, _ in second.points["Step/seconds", 0]] == [4, 5, 6]
    assert [step for step, _ in second.points["Ranks/step_seconds", 0]] == [4]


@pytest.mark.ranks(1, 3)
def test_a_run_that_ends_in_time_says_so(mpi_tmp_path, comm, monkeypatch):
    monkeypatch.setattr("mpispeed.walltime.last_safe_step.CHECK_SECONDS", 0.0)
    monkeypatch.setattr("mpispeed.walltime.requests.LOOK_SECONDS", 0.0)
    section = {"save_dir": str(mpi_tmp_path / "ckpt"), "signals": ["USR2"], "ends_program": False}
    engine = start(settings(1, mpi_tmp_path / "runs", walltime=section), TinyLM())
    train_averaged(engine, batches(2, BATCH))
    if comm.rank == 0:
        (mpi_tmp_path / "ckpt").mkdir(exist_ok=True)
        (mpi_tmp_path / "ckpt" / "STOP").touch()
    comm.barrier()
    train_averaged(engine, batches(1, BATCH))
    assert engine.run_end.must_stop
    engine.destroy()
    if comm.rank == 0:
        notes = read(mpi_tmp_path / "runs" / "run.h5").notes
        assert [note["kind"] for note in notes] == ["begin", "save", "close"] and notes[2]["state"] == "interrupted"


@pytest.mark.ranks(2)
def test_a_checkpoint_of_a_recorded_run_loads_without_a_record(mpi_tmp_path):
    engine = start(settings(2, mpi_tmp_path), TinyLM())
    train_averaged(engine, batches(1, BATCH))
    engine.save_checkpoint(str(mpi_tmp_path / "ckpt"))
    engine.destroy()
    engine = start(config(2, BATCH, 1, **WARM), TinyLM(seed=9))
    assert engine.load_checkpoint(str(mpi_tmp_path / "ckpt"))[0] is not None
    engine.destroy()


@pytest.mark.ranks(1, 2)
def test_a_path_that_was_asked_for_and_cannot_be_written_is_refused_on_all_ranks(mpi_tmp_path, comm):
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    comm.barrier()
    with pytest.raises(ConfigError, match=r"run record in .*file cannot be written: .*run_record\.path"):
        start(settings(1, mpi_tmp_path / "file"), TinyLM())


@pytest.mark.ranks(2)
def test_a_run_folder_that_cannot_be_written_is_a_warning(mpi_tmp_path, comm, monkeypatch, caplog):
    monkeypatch.setattr("mpispeed.logs.rank_logs.begin", lambda *_: None)  # they go into that folder too
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    comm.barrier()
    monkeypatch.setenv("MPISPEED_RUN_DIR", str(mpi_tmp_path / "file"))
    with caplog.at_level("WARNING"):
        engine = start(config(1, BATCH, 1, **WARM), TinyLM())
    train_averaged(engine, batches(2, BATCH))
    engine.destroy()
    assert ("the run goes on without it" in caplog.text) == (comm.rank == 0)


@pytest.mark.ranks(1, 2)
def test_auto_is_on_where_rank_0_knows_a_run_folder(mpi_tmp_path, comm, monkeypatch):
    monkeypatch.setattr("mpispeed.logs.rank_logs.begin", lambda *_: None)  # they go into that folder too
    engine = start(config(1, BATCH, 1, **WARM), TinyLM())
    assert not engine.monitor.enabled and "run_record" not in engine.parts.features.published
    engine.destroy()
    if comm.rank == 0:
        monkeypatch.setenv("MPISPEED_RUN_DIR", str(mpi_tmp_path / "run"))
    engine = start(config(1, BATCH, 1, **WARM), TinyLM())
    train_averaged(engine, batches(2, BATCH))
    assert engine.monitor.enabled
    engine.monitor.write_events([("mine", 2.5, 7)])
    engine.destroy()
    if comm.rank == 0:
        assert [path.name for path in (mpi_tmp_path / "run").iterdir()] == ["run.h5"]
        record = read(mpi_tmp_path / "run" / "run.h5")
        assert record.points["mine", 0] == [(2, 2.5)]
